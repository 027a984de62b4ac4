"""What the sentence models share: generated data, the weights of an LSTM, and its steps in every library.

The LSTM is that of DyNet's ``VanillaLSTMBuilder``: gates stacked in the order i, f, o, g (input, forget, output, new
memory), one bias that is learned and `FORGET_BIAS` in addition for the forget gate, states that start from zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FORGET_BIAS = 1.0
LSTM = ("W_x", "W_h", "b")  # names of its weights, in the order of the builders
TORCH_NAMES = ("weight_ih", "weight_hh", "bias_ih")  # those of the same in PyTorch
SHORTEST, LONGEST = 5, 40  # words of a generated sentence
WORDS = 2000  # in generated sentences

Weights = dict[str, np.ndarray]


def generate(count: int, random: np.random.Generator) -> list[tuple[int, ...]]:
    """Sentences of numbers from 0 to below `WORDS`, few of them frequent."""
    words = np.minimum(random.zipf(1.3, (count, LONGEST)) - 1, WORDS - 1)
    lengths = random.integers(SHORTEST, LONGEST, count, endpoint=True)
    return [tuple(row[:length].tolist()) for row, length in zip(words, lengths)]


def lstm_shapes(inputs: int, hidden: int, suffix: str = "") -> dict[str, tuple[int, ...]]:
    """The shapes of an LSTM's weights."""
    shapes = ((4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,))
    return {name + suffix: shape for name, shape in zip(LSTM, shapes)}


def draw(shapes: dict[str, tuple[int, ...]], hidden: int, random: np.random.Generator) -> Weights:
    """Normal, of a deviation that keeps the gates' inputs near 1 in every width."""
    deviation = np.float32(hidden**-0.5)
    return {name: random.standard_normal(shape, np.float32) * deviation for name, shape in shapes.items()}


def lstm_flops(steps: int, inputs: int, hidden: int) -> float:
    """Of the products of one sentence; the first step has no state to multiply."""
    return 2.0 * 4 * hidden * (steps * inputs + (steps - 1) * hidden)


def add_weights(
    collection: Any, weights: Weights, names: tuple[str, ...], tables: tuple[str, ...] = ("embeddings",)
) -> dict[str, Any]:
    """Parameters of a collection of dynbatch or DyNet, those in ``tables`` as tables."""

    def add(name: str) -> Any:
        kind = "add_lookup_parameters" if name in tables else "add_parameters"
        return getattr(collection, kind)(weights[name].shape)

    return {name: add(name) for name in names}


def with_values(builder: Any, weights: Weights, suffix: str = "") -> list[tuple[Any, np.ndarray]]:
    """The parameters of a builder of one layer, of dynbatch or DyNet, with their values."""
    (parameters,) = builder.get_parameters()
    return [(parameter, weights[name + suffix]) for parameter, name in zip(parameters, LSTM)]


def plain_lstm(p: dict[str, Any], hidden: int, suffix: str = "") -> Any:
    """A function from inputs to outputs in dynbatch's ops: every op is a node of its own."""
    import dynbatch as dy

    W_x, W_h, b = (p[name + suffix] for name in LSTM)
    i_end, f_end, o_end = hidden, 2 * hidden, 3 * hidden

    def transduce(xs):
        h = c = None
        outputs = []
        for x in xs:
            gates = dy.affine_transform([b, W_x, x] if h is None else [b, W_x, x, W_h, h])
            i = dy.logistic(gates[:i_end])
            o = dy.logistic(gates[f_end:o_end])
            g = dy.tanh(gates[o_end:])
            if c is None:
                c = dy.cmult(i, g)
            else:
                c = dy.cmult(dy.logistic(gates[i_end:f_end] + FORGET_BIAS), c) + dy.cmult(i, g)
            h = dy.cmult(o, dy.tanh(c))
            outputs.append(h)
        return outputs

    return transduce


def torch_order(value: np.ndarray) -> np.ndarray:
    """Stacked gates in PyTorch's order i, f, g, o."""
    i, f, o, g = np.split(value, 4)
    return np.concatenate([i, f, g, o])


def torch_lstm(weights: Weights, suffixes: tuple[str, ...]) -> tuple[Any, list[tuple[Any, np.ndarray]]]:
    """``torch.nn.LSTM`` with these weights, one suffix a direction, and its parameters with their values.

    PyTorch learns two biases, which would move twice as fast as one: the second one is the constant forget bias.
    """
    import torch

    hidden, inputs = weights["W_h" + suffixes[0]].shape[1], weights["W_x" + suffixes[0]].shape[1]
    lstm = torch.nn.LSTM(inputs, hidden, bidirectional=len(suffixes) == 2)
    parameters = []
    for suffix, end in zip(suffixes, ("", "_reverse")):
        for name, kind in zip(LSTM, TORCH_NAMES):
            parameters.append((getattr(lstm, f"{kind}_l0{end}"), torch_order(weights[name + suffix])))
        constant = getattr(lstm, f"bias_hh_l0{end}").requires_grad_(False)
        constant.zero_()[hidden : 2 * hidden] = FORGET_BIAS
    return lstm, parameters


def torch_rnn(weights: Weights) -> tuple[Any, list[tuple[Any, np.ndarray]]]:
    """``torch.nn.RNN`` with these weights (without suffix), and its parameters with their values; one bias is 0."""
    import torch

    rnn = torch.nn.RNN(weights["W_x"].shape[1], weights["W_h"].shape[1])
    rnn.bias_hh_l0.requires_grad_(False).zero_()
    return rnn, [(getattr(rnn, f"{kind}_l0"), weights[name]) for name, kind in zip(LSTM, TORCH_NAMES)]


class TorchStep:
    """One step of an LSTM after the other, where what comes next depends on values: one product for all gates.

    Attributes:
        parameters: its tensors with their values: a matrix for input and h, and a bias.
    """

    def __init__(self, weights: Weights, suffix: str = "") -> None:
        import torch

        W_x, W_h, b = (weights[name + suffix] for name in LSTM)
        self.torch, self.hidden = torch, W_h.shape[1]
        values = (np.concatenate([W_x, W_h], axis=1).T, b)
        self.W, self.b = (torch.empty(value.shape, requires_grad=True) for value in values)
        self.parameters = list(zip((self.W, self.b), values))

    def step(self, x: Any, state: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
        """(h, c) after one more input, a row; None before the first one."""
        torch = self.torch
        h, c = state or (x.new_zeros(1, self.hidden), x.new_zeros(1, self.hidden))
        i, f, o, g = torch.addmm(self.b, torch.cat([x, h], 1), self.W).chunk(4, 1)
        c = torch.sigmoid(f + FORGET_BIAS) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


def torch_tensors(weights: Weights, names: tuple[str, ...]) -> dict[str, tuple[Any, np.ndarray]]:
    """Tensors that are learned, with their values."""
    import torch

    return {name: (torch.empty(weights[name].shape, requires_grad=True), weights[name]) for name in names}


def packed(batch: list[tuple], columns: int) -> tuple[list[Any], Any]:
    """Sentences as ``torch.nn.LSTM`` takes them: all first words, all second words, ..., the longest sentence first.

    Arguments:
        batch: of each sentence, its columns: words, and what else there is for each word.

    Returns each column of all sentences as one tensor, and how many sentences are as long as each position, a tensor
    of the CPU in any case.
    """
    import torch

    batch = sorted(batch, key=lambda sentence: -len(sentence[0]))
    lengths = np.array([len(sentence[0]) for sentence in batch])
    table = np.zeros((columns, len(batch), lengths[0]), np.int64)
    for k, sentence in enumerate(batch):
        for column in range(columns):
            table[column, k, : lengths[k]] = sentence[column]
    inside = (np.arange(lengths[0]) < lengths[:, None]).T
    found = [torch.tensor(table[column].T[inside]) for column in range(columns)]
    return found, torch.tensor(inside.sum(1), device="cpu")
