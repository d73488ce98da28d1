#!/usr/bin/env bash
# fineweb_edu.sh: makes token shards from FineWeb-Edu: parquet from the Hugging Face hub -> .jsonl -> token shards.
# (data/fetch_shards.sh fetches shards that others have made and saves you all of this.)
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=data/download.sh
source "$here/download.sh"

usage() {
    cat <<'END'
usage: data/fineweb_edu.sh [--files N] [--dir FOLDER] [--vocab-dir FOLDER]

Fetches the first N of the 14 parquet files of HuggingFaceFW/fineweb-edu, sample-10BT (about 2 GB and 0.7 billion GPT-2
tokens each; ODC-By 1.0), turns them into .jsonl and these into token shards. Run it again, and it continues where it
broke off. Needs curl, python3 with pyarrow, and train_nsa.

  --files N            how many files (default 1)
  --dir FOLDER         where to put everything (default data/fineweb_edu); parquet and .jsonl files stay there until you
                       remove them
  --vocab-dir FOLDER   where the GPT-2 vocabulary is, vocab.bpe and encoder.json (default data/gpt2)

In the environment: HF_ENDPOINT=URL replaces https://huggingface.co by a mirror, PYTHON=COMMAND python3 by another.
END
}

files=1
dir=data/fineweb_edu
vocab=data/gpt2
while (($#)); do
    case $1 in
        --help | -h) usage && exit 0 ;;
        --files | --dir | --vocab-dir)
            (($# > 1)) || usage_error "$1 needs a value"
            case $1 in
                --files) files=$2 ;;
                --dir) dir=$2 ;;
                --vocab-dir) vocab=$2 ;;
            esac
            shift 2
            ;;
        *) usage_error "unknown option $1" ;;
    esac
done
need_number --files "$files" 1 14

# Look for everything that can be missing before fetching gigabytes.
python=${PYTHON:-python3}
train_nsa=$here/../train_nsa
need_command curl "install it with your system's package manager"
need_command "$python" "install Python 3, or set PYTHON to it"
"$python" -c 'import pyarrow.parquet' 2>/dev/null || die "$python has no pyarrow: run $python -m pip install pyarrow"
[[ -x $train_nsa ]] || die "train_nsa is not built: run make first"
[[ -d $vocab ]] || die "no folder $vocab with the GPT-2 vocabulary: give it with --vocab-dir"
if compgen -G "$dir/fineweb_edu_*.bin" >/dev/null; then
    die "$dir holds token shards already: train on them, or remove them to make them anew"
fi
mkdir -p "$dir" || die "cannot make the folder $dir"

check_parquet() { # FILE
    [[ $(head -c 4 "$1" | tr -d '\0') == PAR1 && $(tail -c 4 "$1" | tr -d '\0') == PAR1 ]] ||
        die "$1 is not a whole parquet file: remove it and run again"
}

texts=()
for ((i = 0; i < 10#$files; i++)); do
    name=$(printf '%03d_00000' "$i")
    text=$dir/$name.jsonl
    if [[ ! -e $text ]]; then # it gets this name only when it is whole
        # room for the parquet file, for its text of about twice the size, and for its tokens
        download "$hub/datasets/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT/$name.parquet" \
            "$dir/$name.parquet" check_parquet 4
        "$python" "$here/parquet_to_jsonl.py" "$dir/$name.parquet" "$text" ||
            die "could not turn $dir/$name.parquet into $text"
    fi
    texts+=("$text")
done

"$train_nsa" tokenize --tokenizer gpt2 --vocab-dir "$vocab" --out "$dir/fineweb_edu" --in "${texts[@]}" ||
    die "could not make token shards of $dir/*.jsonl"
cat <<END
Train on the shards with
    ./train_nsa --model 125m --data $(quoted "$dir/fineweb_edu_train_*.bin") \
--val-data $(quoted "$dir/fineweb_edu_val_*.bin")
END
