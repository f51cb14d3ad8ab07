"""Puts back the trees that LightGBM's "dart" leaves dropped after an iteration that finds no split (rank)."""

from __future__ import annotations

import re

import lightgbm

_TURNED = r"(?<=\n)(shrinkage|leaf_value|internal_value)=(.*)"


def with_dropped(booster: lightgbm.Booster) -> lightgbm.Booster | None:
    """Return a booster of the trees before an iteration that has found no split; None where it is `booster` itself.

    "dart" drops some trees for an iteration by turning their signs. LightGBM 4.7 turns them back only where the
    iteration finds a split, and else goes on with a sum that lacks them: for labels around 100, predictions were around
    -200.
    """
    head, *trees = re.split(r"(?<=\n)(?=Tree=\d+\n)", booster.model_to_string(num_iteration=-1))
    if not any("\nshrinkage=-" in tree for tree in trees):
        return None
    turned = [re.sub(_TURNED, _turned, tree) if "\nshrinkage=-" in tree else tree for tree in trees]
    head = re.sub(r"(?<=\n)tree_sizes=.*\n", "", head)  # LightGBM reads a text without them.
    return lightgbm.Booster(model_str=head + "".join(turned))


def _turned(match: re.Match[str]) -> str:
    return f"{match[1]}={' '.join(repr(-float(value)) for value in match[2].split())}"
