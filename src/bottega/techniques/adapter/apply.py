"""Adapters: only narrow layers behind the model's outputs learn, and only they are saved."""

from __future__ import annotations

from bottega.config.recipe import Recipe
from bottega.tasks.branch import Branch
from bottega.techniques.adapter.config import AdapterOptions
from bottega.techniques.lesson import Lesson
from bottega.techniques.lora.apply import adapted


def apply(lesson: Lesson, options: AdapterOptions, recipe: Recipe, branch: Branch) -> Lesson:
    return adapted(lesson, options, recipe, branch, name="adapter")
