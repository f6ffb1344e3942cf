"""Ties the other rooms together for one module: builds their objects, and orders the events of a step."""
