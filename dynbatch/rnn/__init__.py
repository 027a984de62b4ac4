"""Recurrent networks under DyNet's names: builders own the parameters, states are what a sequence has come to.

```python
rnn = dy.VanillaLSTMBuilder(2, 128, 256, model)  # layers, input, hidden
state = rnn.initial_state()
for x in xs:
    state = state.add_input(x)
y = state.output()

ys = rnn.initial_state().transduce(xs)  # the same, all outputs
```

Every layer's step is one cell, so that sequences batch with each other whatever their lengths. A state is never
changed: adding different inputs to one state branches.
"""

from dynbatch.rnn.bidirectional import BiRNNBuilder
from dynbatch.rnn.builder import RNNBuilder
from dynbatch.rnn.coupled_lstm import CoupledLSTMBuilder
from dynbatch.rnn.gru import GRUBuilder
from dynbatch.rnn.simple import SimpleRNNBuilder
from dynbatch.rnn.state import RNNState
from dynbatch.rnn.vanilla_lstm import VanillaLSTMBuilder

LSTMBuilder = VanillaLSTMBuilder

__all__ = [
    "BiRNNBuilder",
    "CoupledLSTMBuilder",
    "GRUBuilder",
    "LSTMBuilder",
    "RNNBuilder",
    "RNNState",
    "SimpleRNNBuilder",
    "VanillaLSTMBuilder",
]
