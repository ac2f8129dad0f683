#!/bin/bash
# Process 1 of the node: a private mount, cgroup, network, UTS, IPC and PID namespace. When it dies, all of it is gone.
# usage: node-init.sh NAME NODE_IP PREFIX READY_FILE
set -e
name=$1 node_ip=$2 prefix=$3 ready=$4

mount --make-rprivate /
hostname "$name"
ip link set lo up

# A sysfs and cgroup tree of the node's own: inside the cgroup namespace its subtree is the root.
host_v2=no; [ -e /sys/fs/cgroup/cgroup.controllers ] && host_v2=yes
mount -t sysfs sysfs /sys
if [ $host_v2 = yes ]; then
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
  # v2 allows no process in a group that hands controllers down, so everything here moves into a leaf first.
  mkdir -p /sys/fs/cgroup/init
  for pid in $(cat /sys/fs/cgroup/cgroup.procs); do echo "$pid" > /sys/fs/cgroup/init/cgroup.procs || true; done
  for c in $(cat /sys/fs/cgroup/cgroup.controllers); do echo "+$c" > /sys/fs/cgroup/cgroup.subtree_control || true; done
else
  mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
  # One mount for each hierarchy of the host, with the same controllers together (v1 allows no other grouping).
  while IFS=: read -r _ controllers _; do
    case ,$controllers, in
      *,cpu,*|*,cpuacct,*|*,cpuset,*|*,memory,*|*,devices,*|*,freezer,*|*,blkio,*|*,pids,*) options=$controllers ;;
      ,name=systemd,) options=none,name=systemd ;;
      *) continue ;;
    esac
    folder=/sys/fs/cgroup/${controllers#name=}
    mkdir -p "$folder"
    mount -t cgroup -o "$options" cgroup "$folder"
    for c in ${controllers//,/ }; do [ -e "/sys/fs/cgroup/${c#name=}" ] || ln -s "$folder" "/sys/fs/cgroup/$c"; done
  done < /proc/self/cgroup
fi

# Private /run (sockets, locks, CNI state); every mount below is shared so that kubelet's mounts reach containers.
mount -t tmpfs -o mode=755 tmpfs /run
mount --make-rshared /

echo 1 > /proc/sys/net/ipv4/ip_forward
# Bridged traffic must pass iptables, or a Service whose pod is on the same bridge answers past the address translation.
for f in /proc/sys/net/bridge/bridge-nf-call-iptables; do [ ! -e $f ] || echo 1 > $f; done
# The kubelet writes machine-wide sysctls. It gets private files over them, and the machine keeps its own values.
mkdir -p /run/sysctl
for kv in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
          kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
  file=/run/sysctl/$(echo "${kv%=*}" | tr / _)
  echo "${kv#*=}" > "$file"
  mount --bind "$file" "/proc/sys/${kv%=*}"
done

# Pods and the node resolve through the cluster's DNS server, which listens on the node's address.
echo "nameserver $node_ip" > /run/resolv.conf
mount --bind /run/resolv.conf "$(readlink -f /etc/resolv.conf)"

ip link add br-mgmt type bridge
ip addr add "$node_ip/$prefix" dev br-mgmt
ip link set br-mgmt up
# Addresses outside the cluster have no way out: the node is closed towards the machine's networks.
ip route add default dev br-mgmt

touch "$ready"
# Not `exec sleep`: process 1 must reap orphans, and bash does.
sleep infinity &
while :; do wait; done
