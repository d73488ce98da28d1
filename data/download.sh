#!/usr/bin/env bash
# download.sh: what fineweb_edu.sh and fetch_shards.sh share. Sourced by them, after `set -euo pipefail`.
# A name alone proves nothing: a file gets its name when it has as many bytes as the server announced, and a file that
# is already there is checked again.

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then # started instead of sourced
    echo "download.sh is a part of data/fetch_shards.sh and data/fineweb_edu.sh: see their --help"
    case ${1:-} in -h | --help) exit 0 ;; *) exit 2 ;; esac
fi

# shellcheck disable=SC2034  # used by the scripts that source this
hub=${HF_ENDPOINT:-https://huggingface.co} # HF_ENDPOINT can name a mirror of the hub

die() { # the message may contain a server's words: print one line without control characters
    echo "${0##*/}: ${*//[[:cntrl:]]/?}" >&2
    exit 1
}

usage_error() {
    echo "${0##*/}: ${*//[[:cntrl:]]/?}; see ${0##*/} --help" >&2
    exit 2
}

quoted() { # WORD: as it can be pasted into a shell
    local quote="'"
    echo "'${1//$quote/$quote\\$quote$quote}'"
}

need_number() { # OPTION VALUE LEAST MOST
    if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3 || 10#$2 > $4)); then
        usage_error "$1 '$2': expected a number from $3 to $4"
    fi
}

need_command() { # COMMAND HINT
    command -v "$1" >/dev/null || die "$1 is not installed: $2"
}

bytes_of() { # FILE
    wc -c <"$1" | tr -d ' '
}

need_space() { # FOLDER BYTES WHAT
    local free_kb
    free_kb=$(df -Pk "$1" | awk 'NR == 2 { print $4 }')
    [[ $free_kb =~ ^[0-9]+$ ]] || die "cannot tell the free space in $1 (df says '$free_kb')"
    ((free_kb >= $2 / 1024)) || die "not enough room in $1 for $3: needs about $(($2 >> 20)) MB," \
        "$((free_kb >> 10)) MB are free; choose another folder with --dir"
}

# The size of the file at a URL, by requesting its first byte; a server that starts to send the whole file is cut off.
remote_size() { # URL
    local answer size
    answer=$(curl --silent --show-error --fail --location --connect-timeout 20 --max-time 120 --retry 3 \
        --range 0-0 --max-filesize 65536 --dump-header - --output /dev/null "$1" 2>&1) ||
        die "cannot reach $1: ${answer##*$'\n'}; check the network, or set HF_ENDPOINT to a mirror"
    size=$(tr -d '\r' <<<"$answer" | sed -n 's/^[Cc]ontent-[Rr]ange: *bytes 0-0\/\([0-9][0-9]*\)$/\1/p' | tail -n 1)
    [[ -n $size ]] ||
        die "$1: the server does not tell the file's size (no Content-Range); set HF_ENDPOINT to another mirror"
    echo "$size"
}

# Fetches URL to FILE unless it is there. A broken download stays as FILE.part and is continued, in this run or the
# next. CHECK is a function that fails with a reason if the file is not what it should be. ROOM is how many times the
# file's size must be free, for what will be made from it.
download() { # URL FILE CHECK [ROOM]
    local url=$1 file=$2 check=$3 room=${4:-1} part=$2.part size have attempt
    if [[ -e $file ]]; then
        "$check" "$file"
        echo "$file is there already"
        return
    fi
    size=$(remote_size "$url")
    have=0
    [[ ! -e $part ]] || have=$(bytes_of "$part")
    ((have <= size)) || die "$part has $have bytes, the file on the server only $size: remove it and run again"
    need_space "$(dirname "$file")" $((size * room - have)) "$file"
    for attempt in 1 2 3 4 5 6 7 8; do
        ((have < size)) || break
        ((attempt == 1)) || sleep "${RETRY_SECONDS:-10}"
        echo "fetching $file: $((size >> 20)) MB, $((have >> 20)) MB of it here"
        curl --fail --location --show-error --progress-bar --connect-timeout 20 --speed-limit 1024 --speed-time 60 \
            --continue-at - --output "$part" "$url" || echo "attempt $attempt of 8 broke off" >&2
        [[ ! -e $part ]] || have=$(bytes_of "$part")
    done
    ((have == size)) || die "$url: $have of $size bytes came: run again to continue"
    "$check" "$part"
    mv "$part" "$file"
}
