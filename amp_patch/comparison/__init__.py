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

Files:

- `comparison.py`: levels with their figures, findings and rules
- `level_result.py`: the figures of one level
- `measures.py`: the figures of a run, and statistics of a few runs
- `plan.py`: levels, seeds and steps
- `seeds.py`: shifted seeds
- `judge.py`: the test of a level against the baseline
- `unjudged.py`: results that measure no quality
- `finding.py`: its answer, as data
- `gap.py`: the difference to the baseline at the same seeds
- `verdict.py`: the finding in words
- `recommendation.py`: the level to use, and the reasons
- `named_lines.py`: the survey's lines beside a level
- `lost_without_masters.py`: notes on lost updates
- `regression.py`: what is worse than in an earlier comparison
- `module_search.py`: modules that a level must keep
- `outcome.py`: the failure of a run in words
- `table.py`: the report for the terminal
- `page.py`: the report as a page and as JSON, with `templates/`
- `headline.py`: the text of the page's card
- `rows.py`: its bars
- `losses.py`: its picture of the losses
- `drawing.py`: SVG
- `what_next.py`: the commands to run next
- `agreement.py`: log-probabilities at the levels beside O0's
- `notebook.py`: `amp.compare` and `amp.assert_level`
- `other_work.py`: other work on the machine, by the CPU time of processes
- `commands/`: `python -m amp_patch compare`, `search` and `report`
"""
