"""Adapters: only narrow layers behind the model's outputs learn, and only they are saved."""

from __future__ import annotations

from bottega.branches.branch import Branch
from bottega.methods.lesson import Lesson
from bottega.methods.lora import adapted
from bottega.schema.recipe import Recipe
from bottega.schema.techniques import AdapterOptions


def apply(lesson: Lesson, options: AdapterOptions, recipe: Recipe, branch: Branch) -> Lesson:
    return adapted(lesson, options, recipe, branch, name="adapter")
