"""End-to-end scenarios, drills, and the embedded Kubernetes cluster they run on."""
