# Prints where a rank runs: its GPU, its cores, the nearest NIC, and the network interface for gloo and NCCL, which it chooses.
# Training logs do not show why a rank is slow that is far from its NIC or bound to one core. Sourced by rank.sh.
# shellcheck shell=bash disable=SC2153 # RANK, LOCAL_RANK, ... are set by rank.sh

# numa_of_cpus LIST [SYS]: NUMA nodes of a list of cores such as "0-15,64-79", comma-separated; "?" when unknown.
numa_of_cpus() {
    local range first last cpu node nodes="" sys=${2:-/sys}
    for range in ${1//,/ }; do
        first=${range%-*} last=${range#*-}
        for ((cpu = first; cpu <= last; cpu++)); do
            for node in "$sys/devices/system/cpu/cpu$cpu"/node[0-9]*; do
                node=${node##*/node}
                [[ $node == "[0-9]*" || ",$nodes," == *",$node,"* ]] || nodes+=${nodes:+,}$node
            done
        done
    done
    printf '%s' "${nodes:-?}"
}

# numa_of_device DIRECTORY: the NUMA node that a device's sysfs directory names; "?" when unknown.
numa_of_device() {
    local node
    node=$(cat "$1/numa_node" 2>/dev/null)
    [[ -n $node && $node != -1 ]] && printf '%s' "$node" || printf '?'
}

# gpu_address INDEX: the PCI address, as sysfs writes it, of the rank's GPU; empty without one.
gpu_address() {
    local devices device=$1 address
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
        IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
        device=${devices[$1]:-$1}
    fi
    address=$(timeout 20 nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader --id="$device" 2>/dev/null) || return 0
    address=${address,,}
    printf '%s' "${address#0000}"
}

# network_devices [SYS]: sysfs entries of the NICs, RDMA devices if there are any, else interfaces that are up.
network_devices() {
    local sys=${1:-/sys} entry rdma=() ethernet=()
    for entry in "$sys"/class/infiniband/*; do [[ -e $entry/device ]] && rdma+=("$entry"); done
    for entry in "$sys"/class/net/*; do
        [[ -e $entry/device && $(cat "$entry/operstate" 2>/dev/null) == up ]] && ethernet+=("$entry")
    done
    ((${#rdma[@]} > 0)) && printf '%s\n' "${rdma[@]}" || printf '%s\n' "${ethernet[@]}"
}

# common_depth PATH PATH: how many leading directories two sysfs paths share.
common_depth() {
    local -a one two
    local depth=0
    IFS=/ read -ra one <<<"$1"
    IFS=/ read -ra two <<<"$2"
    while ((depth < ${#one[@]} && depth < ${#two[@]})) && [[ ${one[depth]} == "${two[depth]}" ]]; do ((depth += 1)); done
    printf '%s' "$depth"
}

# nearest_nic PCI_ADDRESS NUMA LOCAL_RANK [SYS]: the NIC that shares most of the PCI tree with the GPU, else one on the
# same NUMA node, with the reason. A rank takes one of equally near NICs by its local rank. "none" without NICs.
nearest_nic() {
    local address=$1 numa=$2 local_rank=$3 sys=${4:-/sys}
    local gpu="" host_bridge="" entry path nic_numa score best=-1 near=() reason="in turn"
    if [[ -n $address && -e $sys/bus/pci/devices/$address ]]; then
        gpu=$(realpath "$sys/bus/pci/devices/$address")
        host_bridge=$(common_depth "$gpu" "$(realpath "$sys")/devices/pci")
        numa=$(numa_of_device "$gpu")
    fi
    while read -r entry; do
        [[ -n $entry ]] || continue
        path=$(realpath "$entry/device")
        nic_numa=$(numa_of_device "$path")
        score=1 # unknown place
        [[ $numa == "?" || $nic_numa == "?" ]] || score=$((nic_numa == numa ? 2 : 0))
        # Sharing no more than .../devices means different host bridges: only the NUMA node counts then.
        if [[ -n $gpu ]] && (($(common_depth "$gpu" "$path") > host_bridge)); then
            score=$((10 + $(common_depth "$gpu" "$path")))
        fi
        if ((score > best)); then
            best=$score near=()
        fi
        ((score == best)) && near+=("${entry##*/}")
    done < <(network_devices "$sys")
    if ((${#near[@]} == 0)); then
        printf 'none'
        return
    fi
    ((best != 0)) || reason="other NUMA node"
    ((best != 2)) || reason="same NUMA node"
    ((best < 10)) || reason="same PCI root"
    printf '%s (%s)' "${near[local_rank % ${#near[@]}]}" "$reason"
}

# choose_interfaces: sets GLOO_SOCKET_IFNAME to the interface to another node of the job. By default gloo uses the interface
# that its host name resolves to, often the loopback, and the job hangs. NCCL selects RDMA devices itself and needs an
# interface only to start; over plain Ethernet it may use several, so NCCL_SOCKET_IFNAME is not set there.
choose_interfaces() {
    local peer=$MASTER_ADDR address device=""
    ((NODE_RANK == 0)) && peer=${MASTER_PEER:-$MASTER_ADDR}
    address=$(getent ahosts "$peer" 2>/dev/null | awk 'NR == 1 {print $1}')
    if [[ -n $address ]] && command -v ip >/dev/null; then
        device=$(ip -o route get "$address" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p')
    fi
    [[ -z $device ]] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$device}
    if [[ -n $device && -n $(ls -A /sys/class/infiniband 2>/dev/null) ]]; then
        export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$device}
    fi
}

# affinity_line: one line for the log of the job and of the rank.
affinity_line() {
    local cpus gpu numa
    cpus=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)
    numa=$(numa_of_cpus "$cpus")
    gpu=$(gpu_address "$LOCAL_RANK")
    printf 'rank %s | host %s | local rank %s | GPU %s | CPUs %s (NUMA %s) | nearest NIC %s | GLOO_SOCKET_IFNAME %s | NCCL_SOCKET_IFNAME %s\n' \
        "$RANK" "${SLURMD_NODENAME:-$(hostname)}" "$SLURM_LOCALID" \
        "${gpu:-none}${gpu:+ (NUMA $(numa_of_device "/sys/bus/pci/devices/$gpu"))}" "$cpus" "$numa" \
        "$(nearest_nic "$gpu" "$numa" "$SLURM_LOCALID")" "${GLOO_SOCKET_IFNAME:-"gloo's choice"}" "${NCCL_SOCKET_IFNAME:-"NCCL's choice"}"
}
