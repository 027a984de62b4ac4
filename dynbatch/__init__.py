"""Dynamic neural networks written per instance and batched automatically, in DyNet's style."""

from dynbatch.cell import cell
from dynbatch.config import init, load_environment
from dynbatch.errors import *  # noqa: F403
from dynbatch.graph import BatchedExpression, Expression, renew_cg
from dynbatch.ops import *  # noqa: F403
from dynbatch.parameters import ParameterCollection, Parameter
from dynbatch.lookup_parameters import LookupParameter
from dynbatch.initializers import *
from dynbatch.trainers import *
from dynbatch.context import autobatch, no_grad
from dynbatch.batching.run import plan, forward

load_environment()
