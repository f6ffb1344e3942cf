"""The loop that measures steps, plans, swaps and judges, and answers shortages of memory; passes are in `plan`."""
