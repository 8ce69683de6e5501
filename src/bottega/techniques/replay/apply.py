"""Replay over a sequence: a share of what is seen comes from the sources before."""

from __future__ import annotations

from dataclasses import replace

from bottega.config.recipe import Recipe
from bottega.tasks.branch import Branch
from bottega.techniques.continual.apply import needs_sequence
from bottega.techniques.lesson import Lesson
from bottega.techniques.replay.config import ReplayOptions


def apply(lesson: Lesson, options: ReplayOptions, recipe: Recipe, branch: Branch) -> Lesson:
    order = needs_sequence(lesson, "replay")
    return replace(lesson, order=replace(order, share=options.share, memory=options.memory))
