"""Publication of weights: versions in a folder that inference engines follow, mostly as deltas of the version before.

The format is that of SGLang's ``/pull_weights``; ``docs/publish.md`` describes it.
"""
