"""The passes, one a file: each takes a program and returns a new one, and says in its docstring what it changes."""
