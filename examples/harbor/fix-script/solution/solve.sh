#!/bin/bash
sed -i "s/-F';'/-F,/; s/order.csv/orders.csv/" totals.sh
