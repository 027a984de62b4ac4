"""Whether attributes are still the objects that they were, at some nanoseconds an attribute.

What an instance's attribute is follows from its dictionary, unless its class says otherwise. So a fact holds if the
class is as it was, by the version that CPython gives to a class's contents, and the entry of the dictionary is. Where
in the dictionary that entry lies is remembered: `PyDict_Next` takes a position, and says which key it found there.
Facts about a module are about its global variables, which are the entries of its dictionary, whatever its class says.
"""

from sys import intern
from types import ModuleType

from cpython.dict cimport PyDict_Next
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.object cimport PyObject

cdef extern from *:
    """
    static inline unsigned int class_version(PyObject *cls) { return ((PyTypeObject *)cls)->tp_version_tag; }
    """
    unsigned int class_version(object cls)
    object PyObject_GenericGetDict(object owner, void *context)


cdef class Watch:
    """Watches ``owner.name is value`` for some facts ``(owner, name, value)``."""

    def __cinit__(self, tuple facts):
        self.facts = tuple([(owner, intern(name), value) for owner, name, value in facts])  # as dictionaries have them
        self.owners = []
        self.types = []
        self.count = len(facts)
        self.fields = <Field *>PyMem_Calloc(max(1, self.count), sizeof(Field))
        self.versions = <unsigned int *>PyMem_Calloc(max(1, self.count), sizeof(unsigned int))
        if self.fields is NULL or self.versions is NULL:
            raise MemoryError()
        cdef Py_ssize_t i, k
        for i in range(self.count):
            owner, name, value = self.facts[i]
            for k in range(len(self.owners)):
                if self.owners[k] is owner:
                    break
            else:
                k = len(self.owners)
                self.owners.append(owner)
                self.types.append(type(owner))
            self.fields[i].owner = k
            self.fields[i].name = <PyObject *>name
            self.fields[i].value = <PyObject *>value

    def __dealloc__(self):
        PyMem_Free(self.fields)
        PyMem_Free(self.versions)

    cpdef bint unchanged(self) except -1:
        """True only if all facts hold; False where that is not known."""
        cdef Py_ssize_t i, place, known = -1
        cdef PyObject *name
        cdef PyObject *value
        cdef Field *field
        cdef object attributes = None
        for i in range(self.count):
            field = &self.fields[i]
            if field.owner != known:
                known = field.owner
                owner = self.owners[known]
                cls = self.types[known]
                if type(owner) is not cls or class_version(cls) != self.versions[known] or not self.versions[known]:
                    return self._look()
                attributes = PyObject_GenericGetDict(owner, NULL)
            place = field.place
            if not PyDict_Next(attributes, &place, &name, &value) or name != field.name or value != field.value:
                return self._look()
        return True

    cdef bint _look(self) except -1:
        """The same without what is remembered, and remember it."""
        cdef Py_ssize_t i, place, before
        cdef PyObject *found
        cdef PyObject *value
        cdef Field *field
        for i in range(self.count):
            field = &self.fields[i]
            owner, name, _ = self.facts[i]
            cls = type(owner)
            if cls is not ModuleType:
                if cls.__getattribute__ is not object.__getattribute__:
                    return False
                for base in cls.__mro__:
                    if name in base.__dict__:
                        described = type(base.__dict__[name])
                        if hasattr(described, "__set__") or hasattr(described, "__delete__"):
                            return False
            attributes = PyObject_GenericGetDict(owner, NULL)
            before = place = 0
            while PyDict_Next(attributes, &place, &found, &value):
                if found == field.name:
                    break
                before = place
            else:
                return False
            if value != field.value:
                return False
            field.place = before
            getattr(cls, name, None)  # a look-up gives the class a version where it has none
            self.types[field.owner] = cls
            self.versions[field.owner] = class_version(cls)
        return True
