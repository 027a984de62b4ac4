# C types of `lists.py`.

cimport cython

from dynbatch.graph cimport Expression, Graph
from dynbatch.ops.record cimport Op
from dynbatch.signature cimport Signature

cdef Op _esum, _avg, _emax, _logsumexp


@cython.locals(operands=list, graph=Graph, signature=Signature)
cdef _reduce_list(Op op, object exprs)
