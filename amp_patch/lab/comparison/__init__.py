"""The comparison of levels: their figures, the verdicts, and the report as text and as a page.

Words of this package:

- run: one training of the script at one level with one seed.
- result: the number by which runs are judged: the loss at the end of a run, or the metric that it logged last.
- figures: the result, times and memory of a run or a level.
- baseline: the level that the others are compared with, usually O0.
- gap: the mean difference between the results of a level and of the baseline with the same seeds.
- margin: how much worse than the baseline's a result may be and still count as good.
- usable, rejected: a level whose accuracy allows its use; a level that is surely worse.
- kept module: a module that a level leaves in higher precision (`keep_fp32`, `keep_high`).
- rung: a suffix of a level, such as O5+split, with which masters or optimizer state take fewer bytes.
"""
