"""What a step does, to look at: a page for a browser, and a trace file. Lightning is not imported."""
