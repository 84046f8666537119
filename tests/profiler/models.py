"""A small foreign model and training loop, and line numbers of marked lines."""

import inspect
import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=16, vocab=32, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(steps, model=None, optimizer=None, each=lambda step, loss: None):
    model = model or Net()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 32, (2, 8))
    for step in range(steps):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        each(step, loss.detach())
    return model


def line_of(mark, module):
    """Number of the only line of the module that ends with `# mark`."""
    lines = inspect.getsource(sys.modules[module]).splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return found


def by(table, column):
    """A table of a profile, indexed by one of its columns."""
    return table.set_index(column)


def row(table, number=0):
    return table.iloc[number]
