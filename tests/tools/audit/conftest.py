"""Fixtures of the tests of audits: runs of apps, in real ranks."""

from tests.apps.conftest import runs, talk

__all__ = ["runs", "talk"]
