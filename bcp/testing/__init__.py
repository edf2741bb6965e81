"""Conformance suites and fakes, for bcp and for third parties."""
