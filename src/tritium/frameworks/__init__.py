"""Preparations for the frameworks that a user's function may import (rank)."""
