# C types of `lookups.py`.

cimport cython

from dynbatch.graph cimport Expression, Graph
from dynbatch.ops.record cimport Op
from dynbatch.signature cimport Signature

cdef Op _lookup


@cython.locals(signature=Signature, graph=Graph, at=Py_ssize_t)
cdef Expression _row(object p, object index)
