"""Own the running of the chart by a kubelet, in a cluster of one node, below build/cluster."""
