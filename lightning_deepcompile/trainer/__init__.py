"""Lightning's side: strategy, processes, precision, arguments and callbacks; nothing is compiled or planned here."""
