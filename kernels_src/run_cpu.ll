; A CPU's kernel as call.ll launches it: the place of cuLaunchKernelEx. The parameters are its arguments: addresses,
; then integers, then scalars. %Job is that of fusionrt/cpu/settled.py; %name.at, %name.own are where its field is.

%Job = type {
    ptr, ptr, ptr, ptr, ptr, ptr, ptr, i64, i64,   ; 0 of team.Job: answers, kernel, scratch, arguments, size, chunk
    ptr, ptr, i32,                                 ; 9 GOMP_parallel, what a thread of the team does; how many, or 1
    i32, i32,                                      ; 12 where integers and scalars begin
    ptr                                            ; 14 what is not 0 where a fork has lost the team
}

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define i32 @run_cpu(ptr %config, ptr %job, ptr %parameters.at, ptr %extra) {
    %own = alloca %Job                             ; whose arguments are this call's
    %arguments = load ptr, ptr %parameters.at
    %integers_at.at = getelementptr %Job, ptr %job, i32 0, i32 12
    %integers_at = load i32, ptr %integers_at.at
    %integers = getelementptr i8, ptr %arguments, i32 %integers_at
    %scalars_at.at = getelementptr %Job, ptr %job, i32 0, i32 13
    %scalars_at = load i32, ptr %scalars_at.at
    %scalars = getelementptr i8, ptr %arguments, i32 %scalars_at
    %kernel.at = getelementptr %Job, ptr %job, i32 0, i32 2
    %kernel = load ptr, ptr %kernel.at
    %scratch.at = getelementptr %Job, ptr %job, i32 0, i32 3
    %scratch = load ptr, ptr %scratch.at
    %size.at = getelementptr %Job, ptr %job, i32 0, i32 7
    %size = load i64, ptr %size.at
    %threads.at = getelementptr %Job, ptr %job, i32 0, i32 11
    %threads = load i32, ptr %threads.at
    %is_one = icmp eq i32 %threads, 1
    br i1 %is_one, label %alone, label %ask
alone:
    %status = call i32 %kernel(ptr %scratch, ptr %scratch, ptr %arguments, ptr %integers, ptr %scalars, i64 0, i64 %size)
    ret i32 0
ask:
    %forked.at = getelementptr %Job, ptr %job, i32 0, i32 14
    %forked.address = load ptr, ptr %forked.at
    %forked = load i32, ptr %forked.address
    %is_whole = icmp eq i32 %forked, 0
    br i1 %is_whole, label %together, label %lost
lost:
    ret i32 1
together:
    %bytes = ptrtoint ptr getelementptr (%Job, ptr null, i32 1) to i64
    call void @llvm.memcpy.p0.p0.i64(ptr %own, ptr %job, i64 %bytes, i1 false)
    %pointers.own = getelementptr %Job, ptr %own, i32 0, i32 4
    store ptr %arguments, ptr %pointers.own
    %integers.own = getelementptr %Job, ptr %own, i32 0, i32 5
    store ptr %integers, ptr %integers.own
    %scalars.own = getelementptr %Job, ptr %own, i32 0, i32 6
    store ptr %scalars, ptr %scalars.own
    %parallel.at = getelementptr %Job, ptr %job, i32 0, i32 9
    %parallel = load ptr, ptr %parallel.at
    %member.at = getelementptr %Job, ptr %job, i32 0, i32 10
    %member = load ptr, ptr %member.at
    call void %parallel(ptr %member, ptr %own, i32 %threads, i32 0)
    ret i32 0
}
