# What ptxas says of each kernel, with names that c++filt has read, as a line for each functor and architecture: how many
# kernels, their registers, the most bytes that one of them spills. Fails on a stack frame: an array that is indexed at
# run time lies in local memory. Fails where one kernel spills more than `allowed`.

/Compiling entry function/ {
    match($0, /function '.*' for '[^']*'/)
    arch = $0; sub(/.* for '/, "", arch); sub(/'.*/, "", arch)
    name = $0; sub(/.*function '/, "", name); sub(/' for '.*/, "", name)
    gsub(/amp_patch::|\(anonymous namespace\)::|^void /, "", name)
    sub(/run_chunks<[^,]*, [0-9]+, /, "run_chunks<", name) # the type and the number of the tensors of a row
    match(name, /^[a-z_]+<[A-Za-z0-9_:]+(<[^<>]*>)?(, (Strided)?Row)?/) # not how many bytes of rows come as arguments
    name = substr(name, 1, RLENGTH) ">"
    key = arch "  " name
    if (!(key in kernels)) order[++keys] = key
    kernels[key]++
}
/bytes stack frame/ {
    spilled = $5 + $9
    if (spilled > spills[key]) spills[key] = spilled
    # What is spilled lies in the stack frame as well, which has whole words of 8 bytes.
    if ($1 > int(($5 + allowed(key) + 7) / 8) * 8) {
        print "resources.awk: " key ": a stack frame of " $1 " bytes, " $5 " of them spilled" > "/dev/stderr"
        failed = 1
    }
}
/Used [0-9]+ registers/ {
    match($0, /Used [0-9]+/)
    used = substr($0, RSTART + 5, RLENGTH - 5) + 0
    if (!(key in least) || used < least[key]) least[key] = used
    if (used > most[key]) most[key] = used
}
END {
    for (i = 1; i <= keys; i++) {
        key = order[i]
        range = least[key] == most[key] ? most[key] : least[key] " to " most[key]
        if (spills[key] > allowed(order[i])) {
            print "resources.awk: " key ": one kernel spills " spills[key] " bytes" > "/dev/stderr"
            failed = 1
        }
        spilled = spills[key] ? spills[key] " bytes spilled by one" : "none spilled"
        printf "  %-52s %3d of them, %s registers, %s\n", key, kernels[key], range, spilled
    }
    exit failed
}

# With three blocks on a multiprocessor, the registers of Adam's three states with amsgrad do not suffice.
function allowed(key) { return key ~ /run_coded_steps<Adam<true>>/ ? 8 : 0 }
