#!/bin/sh
# Measures all that cross_entropy.jsonl holds, into a new file, on one GPU of 141 GB.
#
#     sh paper_tables/records/bench/cross_entropy.sh NEW.jsonl [small table1 uncapped permuted ignored kernels models errors]
#
# Parts may run on several GPUs of a host at once (CUDA_VISIBLE_DEVICES), into files of their own, joined afterwards. Not
# so the part "small", steps of 2 ms that the host's other work would slow down. BENCH=echo shows the commands.
set -eu
out=${1:?usage: cross_entropy.sh NEW.jsonl [part ...]}
shift
bench=${BENCH:-python3 -m paperlm_kernels.bench cross_entropy}
peers=liger-kernel,cut-cross-entropy,eager,chunked,torch.compile
ours=ours,ours_exact,ours_published_scheme,ours_sorted,ours_lean
times=loss,gradient,both

for part in ${*:-small table1 uncapped permuted ignored kernels models errors}; do
    case $part in
    small) set -- ours_32k,phi35_mini --methods $peers,$ours,ours_auto_exact --measure $times,error,determinism ;;
    table1) set -- gemma2_2b --measure $times,both_cold,error,determinism ;;
    uncapped) set -- gemma2_2b_uncapped --methods $peers,$ours,ours_lean_unfiltered --measure $times ;;
    permuted)
        set -- gemma2_2b_uncapped --permute --methods ours,ours_sorted,ours_lean,torch.compile,cut-cross-entropy \
            --measure $times
        ;;
    ignored)
        set -- gemma2_2b_invalids --methods $peers,ours,ours_published_scheme --measure $times
        ;;
    kernels)
        set -- gemma2_2b_uncapped --methods ours,ours_exact,ours_published_scheme,ours_lean,torch.compile \
            --measure kernels
        ;;
    models)
        set -- llama3_8b,gemma2_9b,qwen25_7b,mistral_nemo,gemma2_27b --methods $peers,$ours,ours_auto_exact \
            --measure $times
        ;;
    errors)
        set -- llama3_8b,gemma2_9b,qwen25_7b,mistral_nemo,gemma2_27b --methods eager,ours,ours_exact --measure error
        ;;
    *) echo "no part named $part; see the head of $0" >&2; exit 2 ;;
    esac
    $bench --out "$out" --cases "$@"
done
