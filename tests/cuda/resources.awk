# What ptxas says of each kernel, with names that c++filt has read, as a line for each functor and architecture: how many
# kernels, their registers, the bytes that they spill.

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
/spill stores/ { spills[key] += $5 + $9 }
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
        spilled = spills[key] ? spills[key] " bytes spilled" : "none spilled"
        printf "  %-52s %3d of them, %s registers, %s\n", key, kernels[key], range, spilled
    }
}
