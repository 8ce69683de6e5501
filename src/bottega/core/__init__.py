"""Interfaces and rules that hold for every task and engine: task, engine, callback, trainer, checkpoints. No framework."""
