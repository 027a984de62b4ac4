"""Memory for a fixed number of 64-bit integers."""

from array import array

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer


cdef class Words:
    """Integers, all zero at first; ``at`` points to them, for as long as this object lives."""

    def __cinit__(self, Py_ssize_t room):
        self.memory = array("q", bytes(8 * room))
        PyObject_GetBuffer(self.memory, &self.buffer, PyBUF_WRITABLE)
        self.at = <long long *>self.buffer.buf

    def __dealloc__(self):
        PyBuffer_Release(&self.buffer)

    cdef void put_moved(self, Py_ssize_t start, Words source, Words moves, Py_ssize_t count, long long base) noexcept:
        """Write the first ``count`` integers of ``source`` from ``start`` on, plus ``base`` where ``moves`` is one."""
        cdef Py_ssize_t i
        for i in range(count):
            self.at[start + i] = source.at[i] + base * moves.at[i]
