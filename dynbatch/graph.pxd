# C types of `graph.py`.

cimport cython

from dynbatch.signature cimport Signature
from dynbatch.words cimport Words


cdef class Operand:
    pass


cdef class Expression(Operand):
    cdef readonly Graph graph
    cdef readonly long long vid
    cdef readonly object key


@cython.final
cdef class Graph:
    cdef readonly object mark
    cdef public bint live
    cdef readonly Words words
    cdef Py_ssize_t room
    cdef readonly Py_ssize_t size
    cdef readonly object floats
    cdef readonly object data
    cdef readonly object dtype
    cdef public long long values
    cdef readonly list signatures
    cdef readonly object lanes
    cdef readonly dict constants
    cdef dict _indices
    cdef readonly dict phases
    cdef readonly object phase_marks
    cdef readonly object skips
    cdef public object random
    cdef public object tape
    cdef public object execution

    cpdef Py_ssize_t touch(self, Signature signature) except -1
    @cython.locals(at=Py_ssize_t, place=tuple)
    cdef Py_ssize_t begin(self, Signature signature, Py_ssize_t count) except -1
    cdef Expression end(self, Py_ssize_t at, object key)
    @cython.locals(made=Expression)
    cpdef Expression add(self, object key)
    @cython.locals(tail=tuple, at=Py_ssize_t)
    cpdef record(self, Signature signature, list words)
    @cython.locals(end=Py_ssize_t)
    cdef Py_ssize_t room_for(self, Py_ssize_t count) except -1
    cpdef trim(self)
    @cython.locals(words=Words)
    cdef _move(self, Py_ssize_t room)
