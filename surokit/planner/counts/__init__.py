"""What a step computes, moves, holds and sends, counted from shapes. No rates here."""
