"""Count what a step computes, moves, holds and sends, from shapes. No rates here."""
