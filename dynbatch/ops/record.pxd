# C types of `record.py`.

cimport cython

from dynbatch.graph cimport Expression, Graph, Operand
from dynbatch.signature cimport Signature


@cython.final
cdef class Use:
    cdef tuple keys
    cdef Py_ssize_t args
    cdef Signature signature

    @cython.locals(i=Py_ssize_t, keys=tuple, e=Expression)
    cdef bint fits(self, list operands, Graph graph) except -1
    @cython.locals(at=Py_ssize_t, words=cython.p_longlong, e=Expression)
    cdef Expression record(self, list operands, Graph graph)


@cython.final
cdef class Op:
    cdef readonly str name
    cdef readonly object compose
    cdef readonly dict table

    @cython.locals(e=Expression, graph=Graph, signature=Signature, at=Py_ssize_t)
    cpdef Expression unary(self, object x)
    @cython.locals(left=Expression, right=Expression, graph=Graph, signature=Signature, at=Py_ssize_t)
    cpdef Expression binary(self, object x, object y)
    @cython.locals(graph=Graph, table=dict, uses=list, use=Use, args=Py_ssize_t)
    cpdef Expression several(self, list operands)
    @cython.locals(graph=Graph, vids=list, e=Expression, signature=Signature)
    cpdef Expression record(self, object operands, object ints, object floats, tuple static)
    @cython.locals(table=dict, types=list)
    cpdef Signature find(self, object operands, Py_ssize_t ints, Py_ssize_t floats, tuple static=*)


cdef dict _first_table(list operands)
cpdef as_operand(object x, str name=*)
