; Steps (fusionrt/steps.py) as Python calls them: a builtin function (METH_FASTCALL) whose `self` is a tuple that
; begins with the address of what is to be done. A value is the place of an object: first the arguments, then
; the constants, which are borrowed, then what the steps give, which is given up at the end, if not before.
;
; Only functions of Python's stable interface are called, found by name in the process.

%Steps = type {
    ptr,                                 ; 0 general, which does the same, however many arguments there are
    i64, i64, i64,                       ; 1 how many arguments, constants, values of all kinds
    ptr, ptr                             ; 4 constants, steps
}
%Step = type {
    i32, i32, i32, i32,                  ; 0 what; the value that it makes; two that it is about
    i32,                                 ; 4 the step that follows where the two are not alike
    i32,                                 ; 5 how many further values it is about
    [16 x i32]                           ; 6 which (steps.GIVEN)
}

declare ptr @PyTuple_GetItem(ptr, i64)
declare ptr @PyTuple_New(i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyObject_GetAttr(ptr, ptr)
declare i32 @PyObject_SetAttr(ptr, ptr, ptr)
declare i32 @PyObject_RichCompareBool(ptr, ptr, i32)
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define ptr @steps(ptr %self, ptr %arguments, i64 %n) {
    %values = alloca [512 x ptr]                 ; steps.VALUES
    %given = alloca [16 x ptr]
    %steps.boxed = call ptr @PyTuple_GetItem(ptr %self, i64 0)
    %steps = call ptr @PyLong_AsVoidPtr(ptr %steps.boxed)
    %of = load %Steps, ptr %steps
    %general = extractvalue %Steps %of, 0
    %n.planned = extractvalue %Steps %of, 1
    %n.constants = extractvalue %Steps %of, 2
    %n.values = extractvalue %Steps %of, 3
    %constants = extractvalue %Steps %of, 4
    %first = extractvalue %Steps %of, 5
    %is_planned = icmp eq i64 %n, %n.planned
    br i1 %is_planned, label %fill, label %otherwise
otherwise:
    %result.general = call ptr @PyObject_Vectorcall(ptr %general, ptr %arguments, i64 %n, ptr null)
    ret ptr %result.general

fill:
    %arguments.bytes = shl i64 %n, 3
    call void @llvm.memcpy.p0.p0.i64(ptr %values, ptr %arguments, i64 %arguments.bytes, i1 false)
    %constants.to = getelementptr ptr, ptr %values, i64 %n
    %constants.bytes = shl i64 %n.constants, 3
    call void @llvm.memcpy.p0.p0.i64(ptr %constants.to, ptr %constants, i64 %constants.bytes, i1 false)
    %n.borrowed = add i64 %n, %n.constants
    %made.to = getelementptr ptr, ptr %values, i64 %n.borrowed
    %n.made = sub i64 %n.values, %n.borrowed
    %made.bytes = shl i64 %n.made, 3
    call void @llvm.memset.p0.i64(ptr %made.to, i8 0, i64 %made.bytes, i1 false)
    br label %step

step:
    %at = phi i32 [ 0, %fill ], [ %at.next, %done ], [ %elsewhere, %unlike ]
    %at.next = add i32 %at, 1
    %this = getelementptr %Step, ptr %first, i32 %at
    %what = load i32, ptr %this
    %to.at = getelementptr %Step, ptr %this, i32 0, i32 1
    %to = load i32, ptr %to.at
    %a.at = getelementptr %Step, ptr %this, i32 0, i32 2
    %a.place = load i32, ptr %a.at
    %a.from = getelementptr ptr, ptr %values, i32 %a.place
    %a = load ptr, ptr %a.from
    %b.at = getelementptr %Step, ptr %this, i32 0, i32 3
    %b.place = load i32, ptr %b.at
    %b.from = getelementptr ptr, ptr %values, i32 %b.place
    %b = load ptr, ptr %b.from
    %elsewhere.at = getelementptr %Step, ptr %this, i32 0, i32 4
    %elsewhere = load i32, ptr %elsewhere.at
    %n.given.at = getelementptr %Step, ptr %this, i32 0, i32 5
    %n.given = load i32, ptr %n.given.at
    %n.given.wide = zext i32 %n.given to i64
    br label %gather
gather:
    %gathered = phi i32 [ 0, %step ], [ %gathered.next, %gather.one ]
    %gather.more = icmp ult i32 %gathered, %n.given
    br i1 %gather.more, label %gather.one, label %do
gather.one:
    %gather.at = getelementptr %Step, ptr %this, i32 0, i32 6, i32 %gathered
    %gather.place = load i32, ptr %gather.at
    %gather.from = getelementptr ptr, ptr %values, i32 %gather.place
    %gather.object = load ptr, ptr %gather.from
    %gather.to = getelementptr ptr, ptr %given, i32 %gathered
    store ptr %gather.object, ptr %gather.to
    %gathered.next = add i32 %gathered, 1
    br label %gather

do:                                              ; in the order of steps.KINDS
    switch i32 %what, label %give [ i32 0, label %call
                                    i32 1, label %get
                                    i32 2, label %set
                                    i32 3, label %tuple
                                    i32 4, label %item
                                    i32 5, label %same
                                    i32 6, label %other
                                    i32 7, label %equal
                                    i32 9, label %let_go ]
call:
    %called = call ptr @PyObject_Vectorcall(ptr %a, ptr %given, i64 %n.given.wide, ptr null)
    br label %made
get:
    %got = call ptr @PyObject_GetAttr(ptr %a, ptr %b)
    br label %made
set:
    %set.value = load ptr, ptr %given
    %set.status = call i32 @PyObject_SetAttr(ptr %a, ptr %b, ptr %set.value)
    %set.fine = icmp eq i32 %set.status, 0
    br i1 %set.fine, label %done, label %end
tuple:
    %tuple.new = call ptr @PyTuple_New(i64 %n.given.wide)
    %tuple.none = icmp eq ptr %tuple.new, null
    br i1 %tuple.none, label %end, label %tuple.next
tuple.next:
    %tuple.k = phi i64 [ 0, %tuple ], [ %tuple.k.next, %tuple.one ]
    %tuple.more = icmp ult i64 %tuple.k, %n.given.wide
    br i1 %tuple.more, label %tuple.one, label %made
tuple.one:
    %tuple.from = getelementptr ptr, ptr %given, i64 %tuple.k
    %tuple.object = load ptr, ptr %tuple.from
    call void @Py_IncRef(ptr %tuple.object)
    %tuple.status = call i32 @PyTuple_SetItem(ptr %tuple.new, i64 %tuple.k, ptr %tuple.object)
    %tuple.k.next = add i64 %tuple.k, 1
    br label %tuple.next
item:
    %item.place = zext i32 %b.place to i64       ; itself, no value
    %item.object = call ptr @PyTuple_GetItem(ptr %a, i64 %item.place)
    call void @Py_IncRef(ptr %item.object)
    br label %made
made:
    %new = phi ptr [ %called, %call ], [ %got, %get ], [ %tuple.new, %tuple.next ], [ %item.object, %item ]
    %new.to = getelementptr ptr, ptr %values, i32 %to
    store ptr %new, ptr %new.to
    %new.none = icmp eq ptr %new, null
    br i1 %new.none, label %end, label %done
done:
    br label %step

same:
    %is_same = icmp eq ptr %a, %b
    br i1 %is_same, label %done, label %unlike
other:
    %is_other = icmp ne ptr %a, %b
    br i1 %is_other, label %done, label %unlike
equal:
    %is_equal = call i32 @PyObject_RichCompareBool(ptr %a, ptr %b, i32 2)
    switch i32 %is_equal, label %unlike [ i32 1, label %done
                                          i32 -1, label %end ]
unlike:
    br label %step

let_go:
    %let_go.k = phi i32 [ 0, %do ], [ %let_go.k.next, %let_go.one ]
    %let_go.more = icmp ult i32 %let_go.k, %n.given
    br i1 %let_go.more, label %let_go.one, label %done
let_go.one:
    %let_go.at = getelementptr %Step, ptr %this, i32 0, i32 6, i32 %let_go.k
    %let_go.place = load i32, ptr %let_go.at
    %let_go.from = getelementptr ptr, ptr %values, i32 %let_go.place
    %let_go.object = load ptr, ptr %let_go.from
    store ptr null, ptr %let_go.from
    call void @Py_DecRef(ptr %let_go.object)     ; where there is one
    %let_go.k.next = add i32 %let_go.k, 1
    br label %let_go

give:
    call void @Py_IncRef(ptr %a)
    br label %end
end:                                             ; with a result, or an error is set
    %result = phi ptr [ %a, %give ], [ null, %set ], [ null, %tuple ], [ null, %made ], [ null, %equal ]
    br label %drop
drop:
    %drop.k = phi i64 [ %n.borrowed, %end ], [ %drop.k.next, %drop.one ]
    %drop.more = icmp ult i64 %drop.k, %n.values
    br i1 %drop.more, label %drop.one, label %dropped
drop.one:
    %drop.from = getelementptr ptr, ptr %values, i64 %drop.k
    %drop.object = load ptr, ptr %drop.from
    call void @Py_DecRef(ptr %drop.object)       ; of those that there are
    %drop.k.next = add i64 %drop.k, 1
    br label %drop
dropped:
    ret ptr %result
}
