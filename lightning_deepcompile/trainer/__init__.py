"""Lightning's side: strategy, processes, precision, arguments and callbacks. No compiling or planning here."""
