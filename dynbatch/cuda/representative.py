"""Programs whose kernels `dynbatch.cuda.report` compiles: cells of the kinds that models are made of, small ones."""

from __future__ import annotations

from collections.abc import Iterator

import dynbatch as dy
from dynbatch import Expression
from dynbatch.compiler.fuse_elementwise import Region, fuse_elementwise
from dynbatch.compiler.ir import SHARED, Program
from dynbatch.cpu.code import ForwardCode
from dynbatch.cpu.routine import late_values
from dynbatch.graph import state

SIZE = 8  # of vectors; sources do not depend on it


class Cells:
    """Parameters, and cells that use them.

    Arguments:
        size: of all vectors.
    """

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.pc = dy.ParameterCollection()
        self.W, self.U, self.V = (self.pc.add_parameters((size, size)) for _ in range(3))
        self.b = self.pc.add_parameters(size)
        self.gain, self.shift = (self.pc.add_parameters(size) for _ in range(2))
        self.words = self.pc.add_lookup_parameters((5, size))
        self.builders = [
            builder(1, size, size, self.pc)
            for builder in (dy.VanillaLSTMBuilder, dy.CoupledLSTMBuilder, dy.GRUBuilder, dy.SimpleRNNBuilder)
        ]

    def _gate(self, x: Expression, y: Expression) -> Expression:
        return dy.affine_transform([self.b, self.W, x, self.U, y])

    @dy.cell
    def leaf(self, word: int) -> tuple[Expression, Expression]:
        """A leaf of a TreeLSTM."""
        x = dy.lookup(self.words, word)
        c = dy.cmult(dy.logistic(self.W * x + self.b), dy.tanh(self.U * x + self.b))
        return dy.cmult(dy.logistic(self.V * x + self.b), dy.tanh(c)), c

    @dy.cell
    def compose(
        self, h_l: Expression, c_l: Expression, h_r: Expression, c_r: Expression
    ) -> tuple[Expression, Expression]:
        """An inner node of a binary TreeLSTM."""
        i, f, g, o = (dy.logistic(self._gate(h_l, h_r)) for _ in range(4))
        c = dy.cmult(i, dy.tanh(self._gate(h_r, h_l))) + dy.cmult(f, c_l) + dy.cmult(g, c_r)
        return dy.cmult(o, dy.tanh(c)), c

    @dy.cell
    def child_sum(self, x: Expression, hs: list[Expression], cs: list[Expression]) -> tuple[Expression, Expression]:
        """A node of a child-sum TreeLSTM."""
        h = dy.esum(hs)
        kept = dy.esum([dy.cmult(dy.logistic(self._gate(x, h_k)), c_k) for h_k, c_k in zip(hs, cs)])
        c = dy.cmult(dy.logistic(self._gate(x, h)), dy.tanh(self.V * x + self.b)) + kept
        return dy.cmult(dy.logistic(self._gate(h, x)), dy.tanh(c)), c

    @dy.cell
    def pool(self, hs: list[Expression]) -> Expression:
        """Reductions of a list."""
        return dy.emax(hs) + dy.average(hs) + dy.logsumexp(hs)

    @dy.cell
    def attend(self, query: Expression, memory: Expression) -> Expression:
        """Attention over the columns of a matrix."""
        weights = dy.softmax(dy.transpose(memory) * query)
        return memory * weights

    @dy.cell
    def attend_to_columns(self, scores: Expression, bias: Expression) -> Expression:
        """Softmax of each column, of a matrix to which a vector is added."""
        return dy.softmax(scores + bias) + dy.log_softmax(scores)

    @dy.cell
    def residual(self, x: Expression) -> Expression:
        """A block with layer normalization, GELU and dropout."""
        return x + dy.dropout(dy.gelu(self.W * dy.layer_norm(x, self.gain, self.shift) + self.b), 0.1)

    @dy.cell
    def draw(self, x: Expression) -> Expression:
        """Noise, and a sample by Gumbel's trick."""
        return dy.noise(x, 0.1) + dy.softmax(x + dy.random_gumbel(self.size))

    @dy.cell
    def loss(self, h: Expression, label: int, weight: float) -> Expression:
        """A classifier's loss, weighted."""
        return dy.pickneglogsoftmax(self.V * h + self.b, label) * weight

    @dy.cell
    def margin(self, h: Expression, label: int) -> Expression:
        """A margin loss, and distances."""
        scores = self.V * h + self.b
        return dy.hinge(scores, label) + dy.squared_distance(scores, h) + dy.huber_distance(scores, h)

    @dy.cell
    def activations(self, x: Expression, y: Expression) -> Expression:
        """Elementwise functions of all kinds."""
        total = dy.silu(x) + dy.elu(x) + dy.softsign(x) + dy.log_sigmoid(x) + dy.rectify(x)
        return total + dy.bmax(x, y) + dy.pow(dy.exp(x), y) + dy.log(dy.square(y) + 1) + dy.sqrt(dy.exp(y))


def _record() -> None:
    """Call each cell once, in a new graph."""
    dy.renew_cg()
    model = Cells()
    x, y = (dy.inputVector([0.1 * k for k in range(SIZE)]) for _ in range(2))
    matrix = dy.inputTensor([[0.1] * 3] * SIZE)
    model.leaf(1)
    model.compose(x, y, x, y)
    model.child_sum(x, [x, y], [y, x])
    model.pool([x, y])
    model.attend(x, matrix)
    model.attend_to_columns(matrix, x)
    model.residual(x)
    model.draw(x)
    model.loss(x, 1, 0.5)
    model.margin(x, 1)
    model.activations(x, y)
    for builder in model.builders:
        builder.initial_state().add_input(x).add_input(y).output()


def programs() -> Iterator[tuple[str, Program, tuple[int, ...]]]:
    """These Programs and their gradients: a name, the Program, and what is stored of it."""
    _record()
    for signature in state.graph.signatures:
        code = ForwardCode(signature.program)
        args, lists, _, _, slots = code.program.layout
        gradient = code.gradient((True,) * args, (True,) * slots, (True,) * lists, False, False)
        yield signature.program.name, code.program, code.stored[True]
        yield f"{signature.program.name}'s gradient", gradient.program, gradient.stored


def regions() -> Iterator[tuple[str, Program, Region]]:
    """Their fused regions, each with a name."""
    for name, program, stored in programs():
        shared = {v for v, x in enumerate(program.values) if x.op is not None and x.domain == SHARED}
        schedule = fuse_elementwise(program, late_values(program) | shared, stored)
        for k, region in enumerate(item for item in schedule if isinstance(item, Region)):
            yield f"{name}, kernel {k}", program, region
