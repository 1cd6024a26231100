#!/bin/sh
# Measures what the records of few bits hold (neuzip, ternary_linear, rmsnorm_quantize, kv_attention, decode, descent),
# into new files of a folder, on one GPU of 141 GB; run it in the repository, whose packages Python finds.
#
#     sh paper_tables/records/bench/few_bits.sh FOLDER [codec profiles figure4 products checkpoint matrices variants gemlite norms attention decode descent]
#
# checkpoint: WEIGHTS is a safetensors file. descent: LOCAL is the folder that holds text/wikipedia_en.*. A peer that is
# not installed has a row that says so. The records hold rows of several runs; documents say which. Packing and descent
# wait for the host: let nothing else run. BENCH=echo shows the commands.
set -eu
folder=${1:?usage: few_bits.sh FOLDER [part ...]}
shift
bench=${BENCH:-python3 -m paperlm bench}
peers="bitsandbytes nf4,nvidia-nvcomp-cu13,dfloat11,splitzip"
large=w2e24,w2e26,w2e27,w2e29
profiles=ours_dense,ours_fast,ours_k1,ours_k0
way="offload pinned,offload pageable"

run() {
    operation=$1
    shift
    $bench "$operation" --out "$folder/$operation.jsonl" "$@"
}

for part in ${*:-codec profiles figure4 products checkpoint matrices variants gemlite norms attention decode descent}; do
    case $part in
    codec) # packing is slow at first: a core of the host wakes
        run neuzip --cases $large --methods "ours,ours_fix4,ours_k3,copy,$peers" --measure decode,encode,update,bits \
            --warmup 100
        ;;
    profiles)
        run neuzip --cases $large --methods "$profiles,$way" --measure decode,encode,update,bits --warmup 100
        ;;
    figure4)
        run neuzip --cases figure4 --methods "ours,ours_fix4,ours_k3,$profiles,copy,$peers,$way" \
            --measure decode,encode,bits --warmup 100
        ;;
    products)
        run neuzip --cases $large --methods ours,ours_fix4,ours_k3,ours_dense,ours_fast,copy \
            --measure gemv,gemv2,gemv4,gemv8,gemv16
        ;;
    checkpoint)
        run neuzip --cases checkpoint --weights "${WEIGHTS:?a safetensors file}" \
            --methods "ours,ours_fix4,ours_k3,$profiles,copy,$peers" --measure decode,encode,bits --warmup 100
        ;;
    matrices)
        run ternary_linear --cases all --methods "ours,torch,torch int_mm,torchao,quack-kernels" --measure product,layer
        ;;
    variants)
        run ternary_linear --cases 7b,3b --methods ours,ours_int4,ours_sparse,ours_int8,torch \
            --measure product,layer,error,determinism
        ;;
    gemlite) # searches its tiles, for most of a minute a shape where nothing of them was compiled before
        run ternary_linear --cases all --methods ours,torch,gemlite --measure layer
        ;;
    norms) # most of a minute a case; the record has the first two
        run rmsnorm_quantize --cases all --methods "ours,torch,torch compiled,liger-kernel" \
            --measure quantize,error,determinism
        ;;
    attention)
        run kv_attention --cases 7b_b1_c4096,7b_b16_c4096,3b_b1_c4096,3b_b16_c4096 \
            --methods "ours_4bit,ours_3bit,ours_3bit_q4,torch,torch padded" --measure decode,append,error,determinism
        ;;
    decode)
        run decode --cases 3B \
            --methods "ours,ours_kv4,ours_kv3,transformers,transformers padded,transformers compiled" --measure decode,memory
        ;;
    descent)
        run descent --cases table1 --methods "vanilla,sgd,lomo,neuzip,neuzip keep" --measure update,memory,kernels \
            --text local:wikipedia_en --local-data "${LOCAL:?the folder of the local texts}" --repeats 12 --seconds 60
        ;;
    *) echo "no part named $part; see the head of $0" >&2; exit 2 ;;
    esac
done
