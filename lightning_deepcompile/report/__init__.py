"""Reports of a step: a page for a browser, and a trace file. Lightning is not imported."""
