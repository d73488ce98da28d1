#!/usr/bin/env bash
# hellaswag.sh: fetches HellaSwag's validation set, 10042 items, from its authors' repository.
set -euo pipefail
# shellcheck source=data/download.sh
source "$(dirname "${BASH_SOURCE[0]}")/download.sh"

usage() {
    cat <<'END'
usage: data/hellaswag.sh [--dir FOLDER]

Fetches hellaswag_val.jsonl (12 MB): contexts with four endings each (Zellers and others, 2019, arXiv 1905.07830).

  --dir FOLDER     where to put it (default data)
END
}

dir=data
while (($#)); do
    case $1 in
        --help | -h) usage && exit 0 ;;
        --dir)
            (($# > 1)) || usage_error "$1 needs a value"
            dir=$2
            shift 2
            ;;
        *) usage_error "unknown option $1" ;;
    esac
done

check_items() { # FILE
    local items
    items=$(grep -c '^{.*"endings".*}' "$1") || true
    ((items == 10042)) || die "$1 has $items items, expected 10042: remove it and run again"
}

need_command curl "install it with your system's package manager"
mkdir -p "$dir" || die "cannot make the folder $dir"
download https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl \
    "$dir/hellaswag_val.jsonl" check_items
cat <<END
$dir/hellaswag_val.jsonl is there. Evaluate a run on it with
    ./train_nsa eval --from RUN --hellaswag $(quoted "$dir/hellaswag_val.jsonl")
END
