#!/usr/bin/env bash
# Two hosts, played by two network namespaces: the ranks find each other, generate what one rank does,
# and notice when the network between them goes away.
#   tp_hosts_test.sh GENERATE CHECKPOINT        exit status 77: namespaces cannot be made here
set -euo pipefail
GENERATE=$1
CHECKPOINT=$2
A=gptfast$$a B=gptfast$$b
DIR=$(mktemp -d)

fail() { printf '%s\n' "$*" >&2; tail -n 5 "$DIR"/*.err >&2; exit 1; }
cleanup() {
  kill -KILL $(jobs -p) 2>/dev/null || true
  ip netns del "$A" 2>/dev/null || true
  ip netns del "$B" 2>/dev/null || true
  rm -rf "$DIR" "/etc/netns/$A" "/etc/netns/$B"
}
trap cleanup EXIT

make_hosts() {
  ip netns add "$A" && ip netns add "$B" &&
    ip link add "v$$a" netns "$A" type veth peer name "v$$b" netns "$B" &&
    ip -n "$A" addr add 10.199.0.1/24 dev "v$$a" && ip -n "$B" addr add 10.199.0.2/24 dev "v$$b" &&
    ip -n "$A" link set "v$$a" up && ip -n "$B" link set "v$$b" up &&
    ip -n "$A" link set lo up && ip -n "$B" link set lo up &&
    mkdir -p "/etc/netns/$A" "/etc/netns/$B" &&
    # c10d asks for the names of addresses, and the name servers cannot be reached from in there.
    for host in "$A" "$B"; do
      printf '%s\n' "127.0.0.1 localhost" "10.199.0.1 $A" "::ffff:10.199.0.1 $A" "10.199.0.2 $B" "::ffff:10.199.0.2 $B" \
        >"/etc/netns/$host/hosts"
      echo "nameserver 127.0.0.1" >"/etc/netns/$host/resolv.conf"
    done && ip netns exec "$A" true
}
make_hosts 2>"$DIR/setup.err" || { echo "skipped: $(cat "$DIR/setup.err")"; exit 77; }

FLAGS=(--checkpoint_path "$CHECKPOINT" --precision float32 --device cpu --num_threads 1 --prompt_ids 7,50,31
       --temperature 0 --ignore_eos --json)

# rank HOST RANK FLAG...: its output goes to $DIR/RANK.out and .err
rank() {
  local host=$1 rank=$2
  shift 2
  exec ip netns exec "$host" env RANK="$rank" WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR="$A" \
    MASTER_PORT=29500 "$GENERATE" "${FLAGS[@]}" "$@" >"$DIR/$rank.out" 2>"$DIR/$rank.err"
}
tokens() { grep -o '"token_ids":\[[^]]*\]' "$1"; }

"$GENERATE" "${FLAGS[@]}" --num_samples 1 --max_new_tokens 20 >"$DIR/one.out"
GLOO_SOCKET_IFNAME=v$$b rank "$B" 1 --num_samples 1 --max_new_tokens 20 & other=$!
GLOO_SOCKET_IFNAME=v$$a rank "$A" 0 --num_samples 1 --max_new_tokens 20 & first=$!
wait "$first" || fail "rank 0 failed"
wait "$other" || fail "rank 1 failed"
[ "$(tokens "$DIR/0.out")" = "$(tokens "$DIR/one.out")" ] || fail "two hosts wrote something else than one"
[ ! -s "$DIR/0.err" ] && [ ! -s "$DIR/1.err" ] && [ ! -s "$DIR/1.out" ] || fail "the run was not quiet"

rank "$B" 1 --num_samples 1000000 --max_new_tokens 200 & other=$!
rank "$A" 0 --num_samples 1000000 --max_new_tokens 200 & first=$!
for _ in $(seq 600); do
  [ -s "$DIR/0.out" ] && break
  sleep 0.1
done
[ -s "$DIR/0.out" ] || fail "no token came"
SECONDS=0
ip -n "$B" link set "v$$b" down  # nothing says so to the other host
(sleep 60; kill -KILL "$first" "$other") & limit=$!
status=0
wait "$first" || status=$?
[ "$status" = 75 ] || fail "rank 0 ended with status $status, expected 75"
status=0
wait "$other" || status=$?
[ "$status" = 75 ] || fail "rank 1 ended with status $status, expected 75"
kill "$limit"
grep -q 'rank 1 has not been heard of for 6 s' "$DIR/0.err" || fail "rank 0 does not say what is wrong"
grep -q 'rank 0 has not been heard of for 6 s' "$DIR/1.err" || fail "rank 1 does not say what is wrong"
echo "noticed after $SECONDS s"
