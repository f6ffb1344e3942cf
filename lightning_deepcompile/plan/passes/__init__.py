"""The passes, one a file: each takes a step's schedules and returns others, and its docstring says what it changes."""
