#!/usr/bin/env bash
# fetch_shards.sh: fetches ready-made GPT-2 token shards of FineWeb or FineWeb-Edu from the Hugging Face hub.
set -euo pipefail
# shellcheck source=data/download.sh
source "$(dirname "${BASH_SOURCE[0]}")/download.sh"

usage() {
    cat <<'END'
usage: data/fetch_shards.sh [--dataset NAME] [--shards N] [--dir FOLDER]

Fetches the first N training shards (100 million tokens, 200 MB each) and the validation shard. Run it again, and it
continues where it broke off.

  --dataset NAME   fineweb-edu-100B  karpathy/fineweb-edu-100B-gpt2-token-shards, 1001 shards (default)
                   fineweb-edu-10B   kjj0/finewebedu10B-gpt2, 99 shards
                   fineweb-10B       kjj0/fineweb10B-gpt2, 103 shards
  --shards N       how many training shards (default 25: 2.5 billion tokens, 20 per parameter of the 125m preset)
  --dir FOLDER     where to put them (default data/NAME)

HF_ENDPOINT=URL in the environment replaces https://huggingface.co by a mirror.
END
}

dataset=fineweb-edu-100B
shards=25
dir=
while (($#)); do
    case $1 in
        --help | -h) usage && exit 0 ;;
        --dataset | --shards | --dir)
            (($# > 1)) || usage_error "$1 needs a value"
            case $1 in
                --dataset) dataset=$2 ;;
                --shards) shards=$2 ;;
                --dir) dir=$2 ;;
            esac
            shift 2
            ;;
        *) usage_error "unknown option $1" ;;
    esac
done
case $dataset in
    fineweb-edu-100B) repository=karpathy/fineweb-edu-100B-gpt2-token-shards name=edu_fineweb most=1001 ;;
    fineweb-edu-10B) repository=kjj0/finewebedu10B-gpt2 name=finewebedu most=99 ;;
    fineweb-10B) repository=kjj0/fineweb10B-gpt2 name=fineweb most=103 ;;
    *) usage_error "--dataset '$dataset': expected fineweb-edu-100B, fineweb-edu-10B or fineweb-10B" ;;
esac
need_number --shards "$shards" 1 "$most"
dir=${dir:-data/$dataset}

# 256 int32 {20240520, 1, number of tokens ...}, then two bytes per token
check_shard() { # FILE
    local magic version tokens
    read -r magic version tokens < <(od -An -td4 -N12 "$1") || true
    [[ ${magic:-} == 20240520 && ${version:-} == 1 ]] || die "$1 is not a token shard: remove it and run again"
    ((tokens > 0 && $(bytes_of "$1") == 1024 + 2 * tokens)) ||
        die "$1 is damaged, its size does not fit its $tokens tokens: remove it and run again"
}

need_command curl "install it with your system's package manager"
mkdir -p "$dir" || die "cannot make the folder $dir"
fetch() { # FILE
    download "$hub/datasets/$repository/resolve/main/$1" "$dir/$1" check_shard
}
fetch "${name}_val_000000.bin"
for ((i = 1; i <= 10#$shards; i++)); do
    fetch "$(printf '%s_train_%06d.bin' "$name" "$i")"
done

cat <<END
$dir holds $shards training shards and one validation shard. Train on them with
    ./train_nsa --model 125m --data $(quoted "$dir/${name}_train_*.bin") --val-data $(quoted "$dir/${name}_val_*.bin")
END
