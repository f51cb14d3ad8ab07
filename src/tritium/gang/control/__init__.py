"""Authenticated connections between coordinator and supervisors (driver, supervisor)."""
