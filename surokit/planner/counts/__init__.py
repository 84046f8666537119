"""Count what a step computes, moves, holds and sends, from shapes alone; rates of devices are not used here."""
