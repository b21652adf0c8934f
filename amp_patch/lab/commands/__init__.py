"""The commands of `python -m amp_patch`: one file for each (run, check, compare, search, report), and its helpers.

Words of this package: `compare` trains each *run* (one level, one seed) in its own process. Processes train in *turns*:
one trains for about half a second, the others wait. A process *hands its turn on* between two steps. The *record* of a
run is its file of events, one line of JSON each. *Asked* steps, levels and runs are those that the user requested; the
script may have made others. A *trial* is one attempt of a search, with one batch or with one set of kept modules.
"""
