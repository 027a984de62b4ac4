# C types of `words.pyx`.


cdef class Words:
    cdef readonly object memory
    cdef long long *at
    cdef Py_buffer buffer

    cdef void put_moved(self, Py_ssize_t start, Words source, Words moves, Py_ssize_t count, long long base) noexcept
