/* FreeBuffers: the free buffers of a pool of registered memory. PooledBuffer: one buffer. */
#include "fast_path.h"

PyTypeObject *free_buffers_type;

#define SMALLEST_BUFFER 1024

PyTypeObject *pooled_buffer_type;

/* Return the index of the stack of the smallest buffers that hold `nbytes`, or -1 if none do. */
static int find_stack(unsigned long long nbytes)
{
	unsigned long long size = SMALLEST_BUFFER;
	int index;

	for (index = 0; index < BUFFER_SIZES; index++, size *= 4)
		if (nbytes <= size)
			return index;
	return -1;
}

static unsigned long long size_at(int index)
{
	return (unsigned long long)SMALLEST_BUFFER << (2 * index);
}

/* Remove a free buffer of at least `nbytes`. Returns a new reference, or NULL if none is free. */
struct pooled_buffer *take_buffer(struct free_buffers *free, uint64_t nbytes)
{
	int index = find_stack(nbytes);
	struct pooled_buffer *buffer;
	struct buffer_stack *stack;

	if (index < 0 || !free->stacks[index].count)
		return NULL;
	stack = &free->stacks[index];
	buffer = stack->buffers[--stack->count];
	buffer->is_free = 0;
	return buffer;
}

/* Add a buffer that is not free. The stack has room: see reserve_place(). */
static void add_buffer(struct pooled_buffer *buffer)
{
	struct buffer_stack *stack = &buffer->free->stacks[buffer->stack];

	if (buffer->is_free || buffer->free->closed)
		return;
	buffer->is_free = 1;
	stack->buffers[stack->count++] = (struct pooled_buffer *)Py_NewRef((PyObject *)buffer);
}

/* Release a buffer to its pool, and drop the reference. The device must not use it any more. */
void release_buffer(struct pooled_buffer *buffer)
{
	add_buffer(buffer);
	Py_DECREF((PyObject *)buffer);
}

unsigned long long buffer_size(const struct pooled_buffer *buffer)
{
	return size_at(buffer->stack);
}

int is_pooled_buffer(PyObject *memory)
{
	return Py_IS_TYPE(memory, pooled_buffer_type);
}

/* --- PooledBuffer --- */

static int pooled_buffer_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct pooled_buffer *buffer = (struct pooled_buffer *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT((PyObject *)buffer->free);
	Py_VISIT(buffer->view);
	return 0;
}

static void pooled_buffer_dealloc(PyObject *self)
{
	struct pooled_buffer *buffer = (struct pooled_buffer *)self;

	PyObject_GC_UnTrack(self);
	Py_CLEAR(buffer->free);
	Py_CLEAR(buffer->view);
	simple_dealloc(self);
}

static PyObject *pooled_buffer_release(PyObject *self, PyObject *unused)
{
	if (((struct pooled_buffer *)self)->is_free) {
		PyErr_SetString(PyExc_ValueError, "the buffer was released before");
		return NULL;
	}
	add_buffer((struct pooled_buffer *)self);
	Py_RETURN_NONE;
}

static PyMemberDef pooled_buffer_members[] = {
	{ "address", T_ULONGLONG, offsetof(struct pooled_buffer, address), READONLY,
	  "The address of the buffer." },
	{ "lkey", T_UINT, offsetof(struct pooled_buffer, lkey), READONLY,
	  "The local key of its memory region." },
	{ "view", T_OBJECT, offsetof(struct pooled_buffer, view), READONLY,
	  "Its memory as a memoryview." },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef pooled_buffer_methods[] = {
	{ "release", pooled_buffer_release, METH_NOARGS,
	  "Release the buffer to the pool. The device must not use it any more." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot pooled_buffer_slots[] = {
	{ Py_tp_doc, (void *)"A part of a registered slab, taken from FreeBuffers." },
	{ Py_tp_traverse, pooled_buffer_traverse },
	{ Py_tp_dealloc, pooled_buffer_dealloc },
	{ Py_tp_members, pooled_buffer_members },
	{ Py_tp_methods, pooled_buffer_methods },
	{ 0, NULL },
};

PyType_Spec pooled_buffer_spec = {
	.name = "aiordma._native._fast_path.PooledBuffer",
	.basicsize = sizeof(struct pooled_buffer),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
	.slots = pooled_buffer_slots,
};

/* --- FreeBuffers --- */

static int free_buffers_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct free_buffers *free = (struct free_buffers *)self;
	unsigned int index, item;

	Py_VISIT(Py_TYPE(self));
	for (index = 0; index < BUFFER_SIZES; index++)
		for (item = 0; item < free->stacks[index].count; item++)
			Py_VISIT((PyObject *)free->stacks[index].buffers[item]);
	return 0;
}

static int free_buffers_clear(PyObject *self)
{
	struct free_buffers *free = (struct free_buffers *)self;
	int index;

	free->closed = 1;
	for (index = 0; index < BUFFER_SIZES; index++) {
		struct buffer_stack *stack = &free->stacks[index];

		while (stack->count) {
			struct pooled_buffer *buffer = stack->buffers[--stack->count];

			Py_DECREF((PyObject *)buffer);
		}
	}
	return 0;
}

static void free_buffers_dealloc(PyObject *self)
{
	int index;

	PyObject_GC_UnTrack(self);
	free_buffers_clear(self);
	for (index = 0; index < BUFFER_SIZES; index++)
		PyMem_Free(((struct free_buffers *)self)->stacks[index].buffers);
	simple_dealloc(self);
}

/* Count one more buffer, for which there is room from now on. Returns 0, or -1 with an exception.
 */
static int reserve_place(struct buffer_stack *stack)
{
	unsigned int capacity = stack->capacity ? 2 * stack->capacity : 4;
	struct pooled_buffer **larger;

	if (stack->existing == stack->capacity) {
		larger = PyMem_Realloc(stack->buffers, capacity * sizeof(*larger));
		if (!larger) {
			PyErr_NoMemory();
			return -1;
		}
		stack->buffers = larger;
		stack->capacity = capacity;
	}
	stack->existing++;
	return 0;
}

static PyObject *free_buffers_add(PyObject *self, PyObject *args)
{
	struct free_buffers *free = (struct free_buffers *)self;
	unsigned long long address;
	struct pooled_buffer *buffer;
	unsigned int lkey;
	PyObject *view;
	Py_ssize_t nbytes;
	int index;

	if (!PyArg_ParseTuple(args, "KIO", &address, &lkey, &view))
		return NULL;
	nbytes = PyObject_Size(view);
	if (nbytes < 0)
		return NULL;
	index = find_stack(nbytes);
	if (index < 0 || size_at(index) != (unsigned long long)nbytes) {
		PyErr_SetString(PyExc_ValueError, "no size of a buffer: see size_for()");
		return NULL;
	}
	if (reserve_place(&free->stacks[index]))
		return NULL;
	buffer = (struct pooled_buffer *)PyType_GenericAlloc(pooled_buffer_type, 0);
	if (!buffer) {
		free->stacks[index].existing--;
		return NULL;
	}
	buffer->free = (struct free_buffers *)Py_NewRef(self);
	buffer->view = Py_NewRef(view);
	buffer->address = address;
	buffer->lkey = lkey;
	buffer->stack = index;
	release_buffer(buffer);
	Py_RETURN_NONE;
}

static PyObject *free_buffers_take(PyObject *self, PyObject *argument)
{
	unsigned long long nbytes = PyLong_AsUnsignedLongLong(argument);
	struct pooled_buffer *buffer;

	if (PyErr_Occurred())
		return NULL;
	buffer = take_buffer((struct free_buffers *)self, nbytes);
	return buffer ? (PyObject *)buffer : Py_NewRef(Py_None);
}

static PyObject *free_buffers_size_for(PyObject *self, PyObject *argument)
{
	unsigned long long nbytes = PyLong_AsUnsignedLongLong(argument);
	int index;

	if (PyErr_Occurred())
		return NULL;
	index = find_stack(nbytes);
	if (index >= 0)
		return PyLong_FromUnsignedLongLong(size_at(index));
	PyErr_SetString(PyExc_ValueError, "more bytes than the largest buffer has");
	return NULL;
}

static PyObject *free_buffers_close(PyObject *self, PyObject *unused)
{
	free_buffers_clear(self);
	Py_RETURN_NONE;
}

static PyObject *free_buffers_nbytes(PyObject *self, void *unused)
{
	unsigned long long nbytes = 0;
	int index;

	for (index = 0; index < BUFFER_SIZES; index++)
		nbytes += size_at(index) * ((struct free_buffers *)self)->stacks[index].count;
	return PyLong_FromUnsignedLongLong(nbytes);
}

static PyGetSetDef free_buffers_getset[] = {
	{ "nbytes", free_buffers_nbytes, NULL, "The number of bytes in all free buffers.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMethodDef free_buffers_methods[] = {
	{ "add", free_buffers_add, METH_VARARGS,
	  "add(address, lkey, view): add the memory of `view` as a free buffer. It has a size that "
	  "size_for() returns." },
	{ "take", free_buffers_take, METH_O,
	  "take(nbytes): return a buffer of at least `nbytes` bytes, or None if none is free." },
	{ "size_for", free_buffers_size_for, METH_O,
	  "size_for(nbytes): return the size of the buffers for `nbytes` bytes: 1024 times a power "
	  "of four." },
	{ "close", free_buffers_close, METH_NOARGS,
	  "Drop all buffers. Buffers that are released later are dropped, too." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot free_buffers_slots[] = {
	{ Py_tp_doc, (void *)"FreeBuffers(): the free buffers of a pool, by their size. The buffer "
			     "that was released last is taken first." },
	{ Py_tp_traverse, free_buffers_traverse },
	{ Py_tp_clear, free_buffers_clear },
	{ Py_tp_dealloc, free_buffers_dealloc },
	{ Py_tp_getset, free_buffers_getset },
	{ Py_tp_methods, free_buffers_methods },
	{ 0, NULL },
};

PyType_Spec free_buffers_spec = {
	.name = "aiordma._native._fast_path.FreeBuffers",
	.basicsize = sizeof(struct free_buffers),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = free_buffers_slots,
};
