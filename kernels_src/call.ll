; A plan of launches as Python calls it: a builtin function (METH_FASTCALL) whose `self` is a tuple that
; begins with the address of the plan. It asks the inputs for their addresses, allocates the outputs and
; launches. Whatever is not as planned, and every error, is left to the plan's general callable, which begins
; anew: only the driver may have refused a later launch by then, as it will again.
;
; Only functions of Python's stable interface are called, found by name in the process, and torch's data_ptr
; for what Inductor compiles, which takes an object: Python's method costs ten times as much. It must be given
; tensors with memory alone; whoever calls has made sure of that. The structs are those of
; fusionrt/runtime/native.py.

%Input = type { i32, i32 }               ; which argument; where its address stands in the parameters
%Number = type { i32, i32, i64 }         ; which argument; where it stands; whether in double precision
%Output = type { ptr, ptr, ptr, i64 }    ; shape, strides, dtype; its place in the result, or -1: it has none
%Place = type { i32, i32, i64 }          ; which value (of outputs the address, then the seed and the counter of
                                         ; random numbers); where it stands in the parameters; what is added to it
%Launch = type { ptr, ptr, i32, i32, i32, i32, i32, i32 }  ; kernel, attributes, how many; grid, layers, block,
                                         ; bytes of shared memory; where its parameters begin
%Config = type { i32, i32, i32, i32, i32, i32, i32, i32, i64, ptr, i32 }  ; CUlaunchConfig, its padding written out
%Plan = type {
    ptr, ptr, ptr, ptr, ptr,             ;  0 general, data_ptr of C, empty_strided, current stream (or null), device
    ptr, ptr,                            ;  5 cuLaunchKernelEx (of a CPU run_cpu.ll), cuStreamIsCapturing
    i64, i64, i64, i64, i64, i64,        ;  7 how many arguments, inputs, numbers, outputs, places, launches
    ptr, ptr, ptr, ptr, ptr,             ; 13 inputs, numbers, outputs, places, launches
    ptr, i64,                            ; 18 the parameters, as far as they are known; their bytes
    i64,                                 ; 20 how many outputs are given
    ptr, ptr, ptr, ptr, ptr,             ; 21 a lock's acquire (or null) and release; get_offset, set_offset and
                                         ;    initial_seed of the generator that it guards
    i64,                                 ; 26 by how much to move it on
    i64, i64,                            ; 27 whether the parameters are those of one stream; that stream
    ptr, i64,                            ; 29 a number that is asked for (or null), the current device's; what it must be
    i64, ptr                             ; 31 which argument is random numbers, (seed, counter, None), or -1; None
}

declare ptr @PyTuple_GetItem(ptr, i64)
declare ptr @PyTuple_New(i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare i64 @PyLong_AsUnsignedLongLongMask(ptr)
declare double @PyFloat_AsDouble(ptr)
declare ptr @PyErr_Occurred()
declare void @PyErr_Clear()
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr)
declare void @Py_DecRef(ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

; The integer that `callable` gives for no argument.
define internal i64 @number(ptr %callable) {
    %object = call ptr @PyObject_Vectorcall(ptr %callable, ptr null, i64 0, ptr null)
    %raised = icmp eq ptr %object, null
    br i1 %raised, label %none, label %some
some:
    %value = call i64 @PyLong_AsUnsignedLongLongMask(ptr %object)
    call void @Py_DecRef(ptr %object)
    ret i64 %value
none:
    ret i64 -1                                   ; and an error is set
}

; The address that `callable` gives for one argument; -1 where it raises.
define internal i64 @address(ptr %callable, ptr %argument) {
    %object = call ptr @PyObject_Vectorcall(ptr %callable, ptr %argument, i64 1, ptr null)
    %raised = icmp eq ptr %object, null
    br i1 %raised, label %none, label %some
some:
    %pointer = call ptr @PyLong_AsVoidPtr(ptr %object)
    %value = ptrtoint ptr %pointer to i64
    call void @Py_DecRef(ptr %object)
    ret i64 %value
none:
    ret i64 -1
}

define ptr @call(ptr %self, ptr %arguments, i64 %n) {
    %parameters = alloca [4096 x i8], align 64   ; all that a kernel can have
    %parameters.at = alloca ptr
    %objects = alloca [8 x ptr]                  ; native.OUTPUTS
    %values = alloca [10 x i64]
    %config = alloca %Config
    %capturing = alloca i32
    %plan.boxed = call ptr @PyTuple_GetItem(ptr %self, i64 0)
    %plan = call ptr @PyLong_AsVoidPtr(ptr %plan.boxed)
    %n.at = getelementptr %Plan, ptr %plan, i32 0, i32 7
    %n.planned = load i64, ptr %n.at
    %is_planned = icmp eq i64 %n, %n.planned
    br i1 %is_planned, label %where, label %general

where:
    %asked.at = getelementptr %Plan, ptr %plan, i32 0, i32 29
    %asked = load ptr, ptr %asked.at
    %none_asked = icmp eq ptr %asked, null
    br i1 %none_asked, label %fill, label %where.ask
where.ask:
    %answer.at = getelementptr %Plan, ptr %plan, i32 0, i32 30
    %answer = load i64, ptr %answer.at
    %answer.now = call i64 @number(ptr %asked)
    %is_still = icmp eq i64 %answer.now, %answer
    br i1 %is_still, label %fill, label %general

fill:
    %bytes.at = getelementptr %Plan, ptr %plan, i32 0, i32 19
    %bytes = load i64, ptr %bytes.at
    %known.at = getelementptr %Plan, ptr %plan, i32 0, i32 18
    %known = load ptr, ptr %known.at
    call void @llvm.memcpy.p0.p0.i64(ptr %parameters, ptr %known, i64 %bytes, i1 false)
    %data_ptr.at = getelementptr %Plan, ptr %plan, i32 0, i32 1
    %data_ptr = load ptr, ptr %data_ptr.at
    %inputs.n.at = getelementptr %Plan, ptr %plan, i32 0, i32 8
    %inputs.n = load i64, ptr %inputs.n.at
    %inputs.at = getelementptr %Plan, ptr %plan, i32 0, i32 13
    %inputs = load ptr, ptr %inputs.at
    br label %input.next

input.next:
    %input.k = phi i64 [ 0, %fill ], [ %input.k.next, %input ]
    %bits = phi i64 [ 0, %fill ], [ %bits.next, %input ]
    %input.is = icmp ult i64 %input.k, %inputs.n
    br i1 %input.is, label %input, label %inputs.done
input:
    %input.which.at = getelementptr %Input, ptr %inputs, i64 %input.k, i32 0
    %input.which = load i32, ptr %input.which.at
    %input.place.at = getelementptr %Input, ptr %inputs, i64 %input.k, i32 1
    %input.place = load i32, ptr %input.place.at
    %input.object.at = getelementptr ptr, ptr %arguments, i32 %input.which
    %input.object = load ptr, ptr %input.object.at
    %input.value = call i64 %data_ptr(ptr %input.object)
    %input.to = getelementptr i8, ptr %parameters, i32 %input.place
    store i64 %input.value, ptr %input.to
    %bits.next = or i64 %bits, %input.value
    %input.k.next = add i64 %input.k, 1
    br label %input.next
inputs.done:
    %bits.low = and i64 %bits, 15
    %is_aligned = icmp eq i64 %bits.low, 0
    br i1 %is_aligned, label %numbers, label %general

numbers:
    %numbers.n.at = getelementptr %Plan, ptr %plan, i32 0, i32 9
    %numbers.n = load i64, ptr %numbers.n.at
    %numbers.at = getelementptr %Plan, ptr %plan, i32 0, i32 14
    %numbers.first = load ptr, ptr %numbers.at
    br label %number.next
number.next:
    %number.k = phi i64 [ 0, %numbers ], [ %number.k.next, %number.done ]
    %number.is = icmp ult i64 %number.k, %numbers.n
    br i1 %number.is, label %number, label %stream
number:
    %number.which.at = getelementptr %Number, ptr %numbers.first, i64 %number.k, i32 0
    %number.which = load i32, ptr %number.which.at
    %number.place.at = getelementptr %Number, ptr %numbers.first, i64 %number.k, i32 1
    %number.place = load i32, ptr %number.place.at
    %number.double.at = getelementptr %Number, ptr %numbers.first, i64 %number.k, i32 2
    %number.double = load i64, ptr %number.double.at
    %number.object.at = getelementptr ptr, ptr %arguments, i32 %number.which
    %number.object = load ptr, ptr %number.object.at
    %number.value = call double @PyFloat_AsDouble(ptr %number.object)
    %number.to = getelementptr i8, ptr %parameters, i32 %number.place
    %number.odd = fcmp oeq double %number.value, -1.0
    br i1 %number.odd, label %number.ask, label %number.store
number.ask:
    %number.error = call ptr @PyErr_Occurred()
    %number.fine = icmp eq ptr %number.error, null
    br i1 %number.fine, label %number.store, label %general
number.store:
    %number.is_double = icmp ne i64 %number.double, 0
    br i1 %number.is_double, label %number.64, label %number.32
number.64:
    store double %number.value, ptr %number.to
    br label %number.done
number.32:
    %number.single = fptrunc double %number.value to float
    store float %number.single, ptr %number.to
    br label %number.done
number.done:
    %number.k.next = add i64 %number.k, 1
    br label %number.next

stream:
    %current.at = getelementptr %Plan, ptr %plan, i32 0, i32 3
    %current = load ptr, ptr %current.at
    %streamless = icmp eq ptr %current, null
    br i1 %streamless, label %own, label %stream.find
stream.find:
    %device.at = getelementptr %Plan, ptr %plan, i32 0, i32 4
    %stream.found = call i64 @address(ptr %current, ptr %device.at)
    switch i64 %stream.found, label %stream.ask [ i64 0, label %own         ; which is never captured
                                                  i64 -1, label %general ]
stream.ask:
    %is_capturing.at = getelementptr %Plan, ptr %plan, i32 0, i32 6
    %is_capturing = load ptr, ptr %is_capturing.at
    %stream.status = call i32 %is_capturing(i64 %stream.found, ptr %capturing)
    %captured = load i32, ptr %capturing
    %stream.odd = or i32 %stream.status, %captured
    %stream.fine = icmp eq i32 %stream.odd, 0
    br i1 %stream.fine, label %own, label %general
own:
    %stream.value = phi i64 [ 0, %stream ], [ 0, %stream.find ], [ %stream.found, %stream.ask ]
    %own.has.at = getelementptr %Plan, ptr %plan, i32 0, i32 27
    %own.has = load i64, ptr %own.has.at
    %own.stream.at = getelementptr %Plan, ptr %plan, i32 0, i32 28
    %own.stream = load i64, ptr %own.stream.at
    %own.matters = icmp ne i64 %own.has, 0
    %own.differs = icmp ne i64 %own.stream, %stream.value
    %own.other = and i1 %own.matters, %own.differs
    br i1 %own.other, label %general, label %random

random:
    %acquire.at = getelementptr %Plan, ptr %plan, i32 0, i32 21
    %acquire = load ptr, ptr %acquire.at
    %draws = icmp ne ptr %acquire, null
    br i1 %draws, label %draw, label %random.ask
random.ask:
    %random.at = getelementptr %Plan, ptr %plan, i32 0, i32 31
    %random.which = load i64, ptr %random.at
    %random.is = icmp sge i64 %random.which, 0
    br i1 %random.is, label %random.given, label %outputs
random.given:
    %rng.at = getelementptr ptr, ptr %arguments, i64 %random.which
    %rng = load ptr, ptr %rng.at
    %rng.state = call ptr @PyTuple_GetItem(ptr %rng, i64 2)
    %none.at = getelementptr %Plan, ptr %plan, i32 0, i32 32
    %none = load ptr, ptr %none.at
    %rng.known = icmp eq ptr %rng.state, %none
    br i1 %rng.known, label %random.take, label %general
random.take:
    %rng.seed = call ptr @PyTuple_GetItem(ptr %rng, i64 0)
    %rng.seed.value = call i64 @PyLong_AsUnsignedLongLongMask(ptr %rng.seed)
    %rng.seed.to = getelementptr i64, ptr %values, i64 8
    store i64 %rng.seed.value, ptr %rng.seed.to
    %rng.counter = call ptr @PyTuple_GetItem(ptr %rng, i64 1)
    %rng.counter.value = call i64 @PyLong_AsUnsignedLongLongMask(ptr %rng.counter)
    %rng.counter.to = getelementptr i64, ptr %values, i64 9
    store i64 %rng.counter.value, ptr %rng.counter.to
    br label %outputs
draw:
    %seed_of.at = getelementptr %Plan, ptr %plan, i32 0, i32 25
    %seed_of = load ptr, ptr %seed_of.at
    %seed = call i64 @number(ptr %seed_of)
    %seed.error = call ptr @PyErr_Occurred()
    %seed.fine = icmp eq ptr %seed.error, null
    br i1 %seed.fine, label %draw.locked, label %general
draw.locked:
    %acquired = call ptr @PyObject_Vectorcall(ptr %acquire, ptr null, i64 0, ptr null)
    %offset_of.at = getelementptr %Plan, ptr %plan, i32 0, i32 23
    %offset_of = load ptr, ptr %offset_of.at
    %offset = call i64 @number(ptr %offset_of)
    %offset.error = call ptr @PyErr_Occurred()
    %offset.fine = icmp eq ptr %offset.error, null
    br i1 %offset.fine, label %draw.move, label %draw.release
draw.move:
    %step.at = getelementptr %Plan, ptr %plan, i32 0, i32 26
    %step = load i64, ptr %step.at
    %offset.next = add i64 %offset, %step
    %offset.object = call ptr @PyLong_FromLongLong(i64 %offset.next)
    store ptr %offset.object, ptr %objects
    %move.at = getelementptr %Plan, ptr %plan, i32 0, i32 24
    %move = load ptr, ptr %move.at
    %moved = call ptr @PyObject_Vectorcall(ptr %move, ptr %objects, i64 1, ptr null)
    call void @Py_DecRef(ptr %offset.object)
    br label %draw.release
draw.release:
    %moved.too = phi ptr [ null, %draw.locked ], [ %moved, %draw.move ]
    %draw.error = call ptr @PyErr_Occurred()
    call void @PyErr_Clear()                     ; the general callable meets it as well
    %release.at = getelementptr %Plan, ptr %plan, i32 0, i32 22
    %release = load ptr, ptr %release.at
    %released = call ptr @PyObject_Vectorcall(ptr %release, ptr null, i64 0, ptr null)
    call void @Py_DecRef(ptr %acquired)
    call void @Py_DecRef(ptr %moved.too)
    call void @Py_DecRef(ptr %released)
    %drawn = icmp eq ptr %draw.error, null
    br i1 %drawn, label %draw.store, label %general
draw.store:
    %seed.to = getelementptr i64, ptr %values, i64 8
    store i64 %seed, ptr %seed.to
    %counter = lshr i64 %offset, 2               ; Philox gives four numbers for each
    %counter.to = getelementptr i64, ptr %values, i64 9
    store i64 %counter, ptr %counter.to
    br label %outputs

outputs:
    %empty.at = getelementptr %Plan, ptr %plan, i32 0, i32 2
    %empty = load ptr, ptr %empty.at
    %outputs.n.at = getelementptr %Plan, ptr %plan, i32 0, i32 10
    %outputs.n = load i64, ptr %outputs.n.at
    %outputs.at = getelementptr %Plan, ptr %plan, i32 0, i32 15
    %outputs.first = load ptr, ptr %outputs.at
    br label %output.next
output.next:
    %output.k = phi i64 [ 0, %outputs ], [ %output.k.next, %output.some ]
    %output.is = icmp ult i64 %output.k, %outputs.n
    br i1 %output.is, label %output, label %places
output:
    %output.like = getelementptr %Output, ptr %outputs.first, i64 %output.k, i32 0
    %output.object = call ptr @PyObject_Vectorcall(ptr %empty, ptr %output.like, i64 3, ptr null)
    %output.slot = getelementptr ptr, ptr %objects, i64 %output.k
    store ptr %output.object, ptr %output.slot
    %output.none = icmp eq ptr %output.object, null
    br i1 %output.none, label %undo, label %output.some
output.some:
    %output.value = call i64 %data_ptr(ptr %output.object)
    %output.to = getelementptr i64, ptr %values, i64 %output.k
    store i64 %output.value, ptr %output.to
    %output.k.next = add i64 %output.k, 1
    br label %output.next

places:
    %places.n.at = getelementptr %Plan, ptr %plan, i32 0, i32 11
    %places.n = load i64, ptr %places.n.at
    %places.at = getelementptr %Plan, ptr %plan, i32 0, i32 16
    %places.first = load ptr, ptr %places.at
    br label %place.next
place.next:
    %place.k = phi i64 [ 0, %places ], [ %place.k.next, %place ]
    %place.is = icmp ult i64 %place.k, %places.n
    br i1 %place.is, label %place, label %launches
place:
    %place.which.at = getelementptr %Place, ptr %places.first, i64 %place.k, i32 0
    %place.which = load i32, ptr %place.which.at
    %place.where.at = getelementptr %Place, ptr %places.first, i64 %place.k, i32 1
    %place.where = load i32, ptr %place.where.at
    %place.more.at = getelementptr %Place, ptr %places.first, i64 %place.k, i32 2
    %place.more = load i64, ptr %place.more.at
    %place.from = getelementptr i64, ptr %values, i32 %place.which
    %place.begin = load i64, ptr %place.from
    %place.value = add i64 %place.begin, %place.more
    %place.to = getelementptr i8, ptr %parameters, i32 %place.where
    store i64 %place.value, ptr %place.to
    %place.k.next = add i64 %place.k, 1
    br label %place.next

launches:
    %launch.at = getelementptr %Plan, ptr %plan, i32 0, i32 5
    %launch.function = load ptr, ptr %launch.at
    %launches.n.at = getelementptr %Plan, ptr %plan, i32 0, i32 12
    %launches.n = load i64, ptr %launches.n.at
    %launches.at = getelementptr %Plan, ptr %plan, i32 0, i32 17
    %launches.first = load ptr, ptr %launches.at
    store %Config { i32 0, i32 0, i32 1, i32 0, i32 1, i32 1, i32 0, i32 0, i64 0, ptr null, i32 0 }, ptr %config
    %config.grid = getelementptr %Config, ptr %config, i32 0, i32 0
    %config.layers = getelementptr %Config, ptr %config, i32 0, i32 1
    %config.block = getelementptr %Config, ptr %config, i32 0, i32 3
    %config.shared = getelementptr %Config, ptr %config, i32 0, i32 6
    %config.stream = getelementptr %Config, ptr %config, i32 0, i32 8
    %config.attributes = getelementptr %Config, ptr %config, i32 0, i32 9
    %config.n = getelementptr %Config, ptr %config, i32 0, i32 10
    store i64 %stream.value, ptr %config.stream
    %thread = call ptr @PyEval_SaveThread()      ; a launch waits where the queue is full
    br label %launch
launch:
    %launch.k = phi i64 [ 0, %launches ], [ %launch.k.next, %launch.more ]
    %launch.this = getelementptr %Launch, ptr %launches.first, i64 %launch.k
    %this = load %Launch, ptr %launch.this
    %kernel = extractvalue %Launch %this, 0
    %attributes = extractvalue %Launch %this, 1
    %attributes.n = extractvalue %Launch %this, 2
    %grid = extractvalue %Launch %this, 3
    %layers = extractvalue %Launch %this, 4
    %block = extractvalue %Launch %this, 5
    %shared = extractvalue %Launch %this, 6
    %begin = extractvalue %Launch %this, 7
    store ptr %attributes, ptr %config.attributes
    store i32 %attributes.n, ptr %config.n
    store i32 %grid, ptr %config.grid
    store i32 %layers, ptr %config.layers
    store i32 %block, ptr %config.block
    store i32 %shared, ptr %config.shared
    %parameters.these = getelementptr i8, ptr %parameters, i32 %begin
    store ptr %parameters.these, ptr %parameters.at
    %status = call i32 %launch.function(ptr %config, ptr %kernel, ptr %parameters.at, ptr null)
    %launch.fine = icmp eq i32 %status, 0
    br i1 %launch.fine, label %launch.more, label %launched
launch.more:
    %launch.k.next = add i64 %launch.k, 1
    %launch.is = icmp ult i64 %launch.k.next, %launches.n
    br i1 %launch.is, label %launch, label %launched
launched:
    call void @PyEval_RestoreThread(ptr %thread)
    br i1 %launch.fine, label %give, label %undo

undo:
    %undo.n = phi i64 [ %output.k, %output ], [ %outputs.n, %launched ]
    br label %undo.next
undo.next:
    %undo.k = phi i64 [ 0, %undo ], [ %undo.k.next, %undo.one ]
    %undo.is = icmp ult i64 %undo.k, %undo.n
    br i1 %undo.is, label %undo.one, label %general
undo.one:
    %undo.slot = getelementptr ptr, ptr %objects, i64 %undo.k
    %undo.object = load ptr, ptr %undo.slot
    call void @Py_DecRef(ptr %undo.object)
    %undo.k.next = add i64 %undo.k, 1
    br label %undo.next

give:
    %given.n.at = getelementptr %Plan, ptr %plan, i32 0, i32 20
    %given.n = load i64, ptr %given.n.at
    %is_one = icmp eq i64 %given.n, 1
    br i1 %is_one, label %give.next, label %give.several
give.several:
    %tuple.new = call ptr @PyTuple_New(i64 %given.n)
    br label %give.next
give.next:
    %result.now = phi ptr [ null, %give ], [ %tuple.new, %give.several ], [ %result.next, %give.done ]
    %give.k = phi i64 [ 0, %give ], [ 0, %give.several ], [ %give.k.next, %give.done ]
    %give.is = icmp ult i64 %give.k, %outputs.n
    br i1 %give.is, label %give.each, label %given
give.each:
    %give.slot = getelementptr ptr, ptr %objects, i64 %give.k
    %give.object = load ptr, ptr %give.slot
    %give.at = getelementptr %Output, ptr %outputs.first, i64 %give.k, i32 3
    %give.place = load i64, ptr %give.at
    %is_given = icmp sge i64 %give.place, 0
    br i1 %is_given, label %give.this, label %drop
drop:                                            ; what was for kernels alone
    call void @Py_DecRef(ptr %give.object)
    br label %give.done
give.this:
    br i1 %is_one, label %give.done, label %give.in_tuple
give.in_tuple:
    %set = call i32 @PyTuple_SetItem(ptr %result.now, i64 %give.place, ptr %give.object)
    br label %give.done
give.done:
    %result.next = phi ptr [ %result.now, %drop ], [ %give.object, %give.this ], [ %result.now, %give.in_tuple ]
    %give.k.next = add i64 %give.k, 1
    br label %give.next
given:
    ret ptr %result.now

general:
    call void @PyErr_Clear()
    %general.at = getelementptr %Plan, ptr %plan, i32 0, i32 0
    %general.callable = load ptr, ptr %general.at
    %result = call ptr @PyObject_Vectorcall(ptr %general.callable, ptr %arguments, i64 %n, ptr null)
    ret ptr %result
}
