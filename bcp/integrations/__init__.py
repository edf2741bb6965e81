"""bcp in trainers that others have written: one module or small package for each, built on its public extension points.

Each module imports its trainer, and of bcp only :mod:`bcp` and :mod:`bcp.extend`: whoever writes an integration of
their own has the same means. ``docs/integrations.md`` says what each of them owns, with which versions it was tested,
and what does not work.
"""
