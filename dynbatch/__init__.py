"""Dynamic neural networks written per instance and batched automatically, in DyNet's style.

The README shows a complete example; `docs/architecture.md` is the map of the code.
"""

from dynbatch import compiled  # noqa: F401  first: it settles which modules those below are
from dynbatch.cell import cell
from dynbatch.config import init, load_environment
from dynbatch.context import align, autobatch, forward, no_grad, phase, plan
from dynbatch.cuda.devices import devices
from dynbatch.cuda.profile import profile
from dynbatch.custom_op import custom_op
from dynbatch.errors import (
    BackwardError,
    CellError,
    CompileError,
    ConfigurationError,
    CustomOpError,
    DeviceError,
    DynbatchError,
    FileFormatError,
    IndexRangeError,
    InstanceStopped,
    MapError,
    OutOfMemoryError,
    ShapeError,
    StaleExpressionError,
    StaticError,
    ValidityError,
)
from dynbatch.fibers import map, wait
from dynbatch.functions import *  # noqa: F403  under DyNet's names; `dynbatch.functions.__all__` lists them
from dynbatch.functions import __all__ as _function_names
from dynbatch.graph import Expression, renew_cg
from dynbatch.initializers import (
    ConstInitializer,
    GlorotInitializer,
    IdentityInitializer,
    NormalInitializer,
    NumpyInitializer,
    SaxeInitializer,
    UniformInitializer,
)
from dynbatch.lookup_parameters import LookupParameter
from dynbatch.parameters import Parameter, ParameterCollection
from dynbatch.random_stream import stream
from dynbatch.rnn import (
    BiRNNBuilder,
    CoupledLSTMBuilder,
    GRUBuilder,
    LSTMBuilder,
    RNNState,
    SimpleRNNBuilder,
    VanillaLSTMBuilder,
)
from dynbatch.serialization import load, load_checkpoint, load_metadata, save, save_checkpoint
from dynbatch.static import static
from dynbatch.trainers import (
    AdagradTrainer,
    AdamTrainer,
    AMSGradTrainer,
    AmsgradTrainer,
    MomentumSGDTrainer,
    RMSPropTrainer,
    SimpleSGDTrainer,
    Trainer,
)

__version__ = "0.1.0"

__all__ = [
    "VanillaLSTMBuilder",
    "SimpleRNNBuilder",
    "RNNState",
    "LSTMBuilder",
    "GRUBuilder",
    "CoupledLSTMBuilder",
    "BiRNNBuilder",
    "AMSGradTrainer",
    "AdagradTrainer",
    "AdamTrainer",
    "AmsgradTrainer",
    "BackwardError",
    "CellError",
    "CompileError",
    "ConfigurationError",
    "ConstInitializer",
    "CustomOpError",
    "DeviceError",
    "DynbatchError",
    "Expression",
    "FileFormatError",
    "GlorotInitializer",
    "IdentityInitializer",
    "IndexRangeError",
    "InstanceStopped",
    "LookupParameter",
    "MapError",
    "MomentumSGDTrainer",
    "NormalInitializer",
    "NumpyInitializer",
    "OutOfMemoryError",
    "Parameter",
    "ParameterCollection",
    "RMSPropTrainer",
    "SaxeInitializer",
    "ShapeError",
    "SimpleSGDTrainer",
    "StaleExpressionError",
    "StaticError",
    "Trainer",
    "UniformInitializer",
    "ValidityError",
    "align",
    "autobatch",
    "cell",
    "custom_op",
    "devices",
    "forward",
    "init",
    "load",
    "load_checkpoint",
    "load_metadata",
    "map",
    "no_grad",
    "phase",
    "plan",
    "profile",
    "renew_cg",
    "save",
    "save_checkpoint",
    "static",
    "stream",
    "wait",
    *_function_names,
]

load_environment()
