"""A Grafana dashboard and alert rules for bcp's metrics in Prometheus."""
